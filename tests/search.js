// Prints the pages that the search of a built site finds: node search.js SITE QUERY...
// A line per query: the names of the pages, best first.
const fs = require("fs");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const quiet = { addEventListener: () => {}, getElementById: () => null };
const context = vm.createContext({
  console,
  document: { ...quiet, body: quiet, documentElement: { dataset: {} } },
  localStorage: { setItem: () => {} },
  SPHINX_HIGHLIGHT_ENABLED: false,
  DOCUMENTATION_OPTIONS: {},
  _: (text) => text,
  _ready: () => {},
});
context.window = context;
const scripts = ["language_data", "scorer", "searchtools", "search"];
const files = scripts.map((name) => `_static/${name}.js`);
for (const file of [...files, "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${file}`, "utf8"), context);
context.queries = queries;
const found = vm.runInContext(
  "queries.map((q) => Search._performSearch(...Search._parseQuery(q)).reverse())",
  context,
);
for (const results of found)
  console.log([...new Set(results.map(([page]) => page))].slice(0, 5).join(" "));
