// Questions find pages, too. Words that only ask are left out. A page whose other names hold
// the rest comes first, and then pages with all words. If there are none, pages with some of
// them: rare words count more than frequent ones.
if (typeof Search !== "undefined") {
  const asking =
    "am any are can could did do does each get give got had has have how if its may me my need " +
    "one our should so than that them there use using we what when where which who why " +
    "will with work works would you your";
  asking.split(" ").forEach((word) => stopwords.add(word));

  // The query, or the part of it by which pages are called, too.
  const named = (query) => {
    const names = Object.keys(Search._index.indexentries);
    const words = splitQuery(query.toLowerCase().trim());
    const all = words.join(" ");
    const rest = words.filter((word) => !stopwords.has(word)).join(" ");
    for (const part of [all, rest])
      if (part && names.some((name) => name.includes(part))) return part;
    const within = names.filter((name) => ` ${rest} `.includes(` ${name} `));
    return within.sort((a, b) => b.length - a.length)[0] || query;
  };

  const perform = Search._performSearch;
  Search._performSearch = (query, ...terms) => perform(named(query), ...terms);

  // An excerpt of the page for a name that leads to a place without text of its own.
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => textOf(html, anchor) || textOf(html);

  const withAll = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const found = withAll(words, excluded);
    if (found.length || words.size < 2) return found;
    const pages = new Map();
    for (const word of words) {
      const results = withAll(new Set([word]), excluded);
      for (const result of results) {
        const [page, , , , score] = result;
        const before = pages.has(page) ? pages.get(page)[4] : 0;
        pages.set(page, result.with(4, before + score / Math.sqrt(results.length)));
      }
    }
    return [...pages.values()];
  };
}
