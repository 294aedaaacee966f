// What a page does beside Material's own scripts: details open where a link leads into them, the
// table of results is sorted by a click on a heading and filtered by what is typed, and on a phone
// the rows of a table that is wider than the screen become blocks with a label for each cell.

function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const details = target && target.closest("details");
  if (details) {
    details.open = true;
    details.scrollIntoView();
  }
  if (!target && movedTo(location.hash) && location.pathname.includes("/rl-algorithms/")) {
    location.replace(movedTo(location.hash));
  }
}

function movedTo(hash) { // pages had a section for each file, such as #ppo_ataripy
  const file = hash.match(/^#(\w+)py$/);
  return file ? `../../code/${file[1]}/` : null;
}

function number(text) {
  const found = text.replace(/,/g, "").match(/^-?\d+(\.\d+)?/);
  const unit = { k: 1e3, M: 1e6 }[text.slice(-1)] || 1;
  return found ? Number(found[0]) * unit : null;
}

function sortRows(table, column, falling) {
  const body = table.tBodies[0];
  const key = row => row.cells[column].textContent.trim();
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (!x || !y) return (x ? 0 : 1) - (y ? 0 : 1); // empty cells come last
    const [m, n] = [number(x), number(y)];
    const order = m !== null && n !== null ? m - n : x.localeCompare(y);
    return falling ? -order : order;
  });
  body.append(...rows);
}

function prepareResults(frame) {
  const table = frame.querySelector("table");
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      sortRows(table, column, falling);
    });
    for (const row of table.tBodies[0].rows) {
      row.cells[column].dataset.label = head.textContent.trim();
    }
  });
  table.querySelectorAll("td:first-child a").forEach(breakNames);
  const filter = document.createElement("input");
  const shown = document.createElement("span");
  filter.type = "search";
  filter.placeholder = "Filter: dqn, Atari, reproduced, ...";
  filter.setAttribute("aria-label", "Filter the results");
  const update = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
    shown.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
  };
  filter.addEventListener("input", update);
  frame.prepend(filter, shown);
  update();
}

function breakNames(element) { // long names of files break after an underscore
  element.normalize();
  for (const node of [...element.childNodes].filter(x => x.nodeType === Node.TEXT_NODE)) {
    const parts = node.textContent.split(/(?<=_)/);
    node.replaceWith(...parts.flatMap((x, i) => i ? [document.createElement("wbr"), x] : [x]));
  }
}

function stackTables() {
  if (!matchMedia("(max-width: 60em)").matches) {
    return;
  }
  for (const table of document.querySelectorAll(".md-typeset table:not([class], [data-stacked])")) {
    const isOther = table.closest(".results, .stacked, .diff") || !table.tHead;
    if (isOther || !table.offsetWidth || table.scrollWidth <= innerWidth - 30) {
      continue;
    }
    table.dataset.stacked = "";
    const labels = [...table.tHead.rows[0].cells].map(head => head.textContent.trim());
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => { cell.dataset.label = labels[column]; });
    }
  }
}

addEventListener("hashchange", openTarget);
addEventListener("load", stackTables);
document.addEventListener("toggle", stackTables, true);
addEventListener("DOMContentLoaded", () => {
  openTarget();
  document.querySelectorAll(".md-typeset h1").forEach(breakNames);
  document.querySelectorAll(".results").forEach(prepareResults);
});
