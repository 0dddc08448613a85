"use strict";
// Dark mode, search, explanations of terms, filters of tables. Pages are read without it, too.

const root = document.documentElement;
const base = document.body.dataset.root;

// --- dark mode: the system's, until the reader chooses
const themeButton = document.getElementById("theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches;
}
function showTheme() {
  themeButton.setAttribute("aria-pressed", String(isDark()));
}
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* not kept */ }
  showTheme();
});
systemIsDark.addEventListener("change", showTheme);
showTheme();

// --- the sidebar is open where there is room for it
const menu = document.getElementById("menu");
const hasRoom = matchMedia(`(min-width: ${document.body.className === "wide" ? 100 : 60}.01rem)`);
hasRoom.addEventListener("change", () => { menu.open = hasRoom.matches; });
const here = menu.querySelector("[aria-current]");
if (here && hasRoom.matches) menu.scrollTop = here.offsetTop - menu.clientHeight / 3;

// --- search: the records come with the first look at the field, as a script, so that files suffice
const field = document.getElementById("search");
const found = document.getElementById("found");
let records = null, chosen = -1;
window.searchRecords = (list) => {
  records = list.map(([address, page, heading, text]) =>
    ({ address, page, heading, text, low: [page, heading, text].map((s) => " " + s.toLowerCase()) }));
  look();
};
function load() {
  if (records !== null) return;
  records = [];
  const script = document.createElement("script");
  script.src = base + "assets/search.js";
  document.head.append(script);
}
// What a word is looked for as: where it begins a word, without the ending that a question gives it.
const ENDING = /(?:ations?|ings?|ed|es|s)$/;
function stem(word) {
  const bare = word.replace(ENDING, "");
  return bare.length < 4 ? word : bare;
}
// Words that only make a question of the others.
const ASKING = new Set(("a an and are be can do does for from how i in is it its me must my of on or should so that the " +
  "there this to was what when where which why will with you your").split(" "));
// What the pages call otherwise than people do; where it is one term, its words are looked for together.
const CALLED = [[/(?:activation|gradient)[ -]checkpoint(?:ing|s)?/g, "recomputation"], [/flash[ -]attention/g, "flashattention"],
  [/warm[ -]?up/g, "warm-up"], [/all[ _]reduce/g, "all-reduce"], [/all[ _]gather/g, "all-gather"],
  [/reduce[ _]scatter/g, "reduce-scatter"], [/all[ _]to[ _]all/g, "all-to-all"]];
function wordsOf(question) {
  let text = question.toLowerCase();
  for (const [called, here] of CALLED) text = text.replace(called, here);
  const words = text.split(/[\s?!,;]+/).filter(Boolean);
  const telling = words.filter((word) => !ASKING.has(word));
  return (telling.length ? telling : words).map(stem);
}
// What the pages call things that are asked for by another word.
const ALSO = { overload: ["load", "unused"], volume: ["sent", "bytes"], traffic: ["sent", "bytes"], "zero-1": ["zero"],
  "zero-2": ["zero"], "zero-3": ["zero"], oom: ["memory"], fsdp: ["zero"], ddp: ["data parallel"] };
function worth(record, word) {
  const [page, heading, text] = record.low;
  const begins = (s) => s.split(word).slice(0, -1).filter((before) => /[^a-z0-9]$/.test(before)).length;
  const inside = heading.includes(word) + page.includes(word) + text.includes(word);
  return 12 * Math.min(1, begins(heading)) + 4 * Math.min(1, begins(page)) +
         Math.min(6, 2 * Math.log2(1 + begins(text))) + Math.min(1, inside);
}
function score(record, words) {
  let sum = 0, met = 0;
  for (const word of words) {
    const value = Math.max(worth(record, word), ...(ALSO[word] || []).map((other) => 0.7 * worth(record, other)));
    met += value > 0;
    sum += value;
  }
  if (!met || 2 * met < words.length) return 0;  // most of the words have to be met; each that is not costs
  const exact = record.heading.toLowerCase().replace(ENDING, "") === words.join(" ");
  const known = /glossary|notation/i.test(record.page) && exact ? 40 : 0;  // what a term means
  const idea = /^[12]\. /.test(record.heading) ? 4 : 0;  // where a chapter says what it is about
  const asked = /^docs\/faq\.html#/.test(record.address) ? 6 : 0;
  const code = /\.(?:h|cuh|cpp|cu)\.html#|^reference\//.test(record.address) && !exact ? 0.6 : 1;
  return (code * (sum + asked + idea) + 20 * exact + known) * (met / words.length) ** 3;
}
function excerpt(record, word) {
  const at = Math.max(0, record.low[2].indexOf(word) - 50);
  return (at ? "… " : "") + record.text.slice(at, at + 160) + " …";
}
function look() {
  const words = wordsOf(field.value);
  found.replaceChildren();
  chosen = -1;
  const best = !words.length ? [] : records.map((record) => [score(record, words), record])
    .filter(([value]) => value).sort((a, b) => b[0] - a[0]).slice(0, 20);
  for (const [, record] of best) {
    const item = document.createElement("li");
    item.setAttribute("role", "option");
    item.id = "found-" + found.children.length;
    item.dataset.address = record.address;
    const title = document.createElement("b");
    title.textContent = record.heading || record.page;
    const more = document.createElement("small");
    more.textContent = (record.heading ? record.page + ": " : "") + excerpt(record, words[0]);
    item.append(title, more);
    found.append(item);
  }
  if (words.length && records.length && !best.length) {
    const item = document.createElement("li");
    item.textContent = "Nothing found.";
    found.append(item);
  }
  show(found.children.length > 0);
}
function show(open) {
  found.hidden = !open;
  field.setAttribute("aria-expanded", String(open));
  if (!open) field.removeAttribute("aria-activedescendant");
}
function choose(step) {
  const items = [...found.querySelectorAll("[role=option]")];
  if (!items.length) return;
  chosen = (chosen + step + items.length) % items.length;
  items.forEach((item, i) => item.setAttribute("aria-selected", String(i === chosen)));
  items[chosen].scrollIntoView({ block: "nearest" });
  field.setAttribute("aria-activedescendant", items[chosen].id);
}
function go(item) {
  if (item && item.dataset.address) {
    location.href = base + item.dataset.address;
    show(false);
  }
}
field.addEventListener("focus", load);
field.addEventListener("input", () => { load(); look(); });
field.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") choose(1);
  else if (event.key === "ArrowUp") choose(-1);
  else if (event.key === "Enter") go(found.children[Math.max(0, chosen)]);
  else if (event.key === "Escape") show(false);
  else return;
  event.preventDefault();
});
found.addEventListener("mousedown", (event) => go(event.target.closest("li")));
document.addEventListener("click", (event) => { if (!event.target.closest(".find")) show(false); });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(input|select|textarea)$/i.test(document.activeElement.tagName)) {
    event.preventDefault();
    field.focus();
  }
});

// --- what a term means, beside it
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
function explain(term) {
  tip.textContent = term.dataset.tip;
  tip.hidden = false;
  term.setAttribute("aria-describedby", "tip");
  const box = term.getBoundingClientRect(), margin = 8;
  const width = document.documentElement.clientWidth;
  const left = Math.min(box.left, width - tip.offsetWidth - margin);
  const above = box.bottom + tip.offsetHeight + margin > innerHeight;
  tip.style.left = Math.max(margin, left) + scrollX + "px";
  tip.style.top = (above ? box.top - tip.offsetHeight - margin : box.bottom + margin) + scrollY + "px";
}
function hush() { tip.hidden = true; tip.style.left = tip.style.top = "0"; }
for (const [start, end] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  document.addEventListener(start, (event) => {
    const term = event.target.closest && event.target.closest(".term");
    if (term) explain(term);
  });
  document.addEventListener(end, hush);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });

// --- tables with a filter
for (const form of document.querySelectorAll("form[data-filters]")) {
  const rows = [...document.querySelectorAll("#" + form.dataset.filters + " tbody tr")];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const filter = () => {
    const wanted = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = form.elements.kind.value;
    let count = 0;
    rows.forEach((row, i) => {
      row.hidden = (kind && row.dataset.kind !== kind) || !wanted.every((word) => words[i].includes(word));
      count += !row.hidden;
    });
    form.querySelector("output").textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
}
