// Sphinx's own scores of search results, except that guides come before the reference, and
// the changelog comes last.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "changelog") return score - 1000;
    return page.startsWith("api/") ? score / 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
