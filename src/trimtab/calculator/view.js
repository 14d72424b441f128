// Puts answers into the page. Text goes in as text; only drawings of the server become markup.

export const byId = (id) => document.getElementById(id);

export const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};

const parse = (drawing) => {
  const svg = document.importNode(new DOMParser().parseFromString(drawing, "image/svg+xml").documentElement, true);
  for (const title of svg.querySelectorAll(".mark > title")) title.remove();
  return svg;
};

export const draw = (figure, drawings) => figure.replaceChildren(...drawings.map(parse));

export const showFigures = (list, figures) => {
  list.replaceChildren(...figures.map(({ name, value }) => {
    const none = !/\d/.test(value);
    return make("div", {}, make("dt", {}, name), make("dd", { class: none ? "none" : "" }, value));
  }));
};

const percent = (share) => `${share < 0.0995 && share > 0 ? (100 * share).toFixed(1) : (100 * share).toFixed(0)} %`;

// A part keeps its element from answer to answer, so that it keeps the focus. With `open`, a click on a part calls it.
export const showParts = (list, parts, open = null) => {
  const known = new Map([...list.children].map((item) => [item.dataset.part, item]));
  const items = parts.map(({ name, shown, share }) => {
    let item = known.get(name);
    if (!item) {
      const cells = [
        make("span", { class: `swatch ${name}`, "aria-hidden": "true" }), make("span", { class: "name" }, name),
        make("span", { class: "size" }), make("span", { class: "share" }),
      ];
      const row = open ? make("button", { class: "part", type: "button", "aria-expanded": "false" }, ...cells) : make("div", { class: "part" }, ...cells);
      item = make("li", { "data-part": name }, row);
      if (open) {
        item.append(make("div", { class: "owners", hidden: true }));
        row.addEventListener("click", () => open(name));
      }
    }
    item.querySelector(".size").textContent = shown;
    item.querySelector(".share").textContent = percent(share);
    return item;
  });
  const same = items.length === list.children.length && items.every((item, at) => list.children[at] === item);
  if (!same) list.replaceChildren(...items);
};

export const setVerdict = (box, kind) => { box.className = `verdict ${kind}`; };

export const list = (element, lines) => element.replaceChildren(...lines.map((line) => make("li", {}, line)));

// What a part is, and the modules that own it; null closes it.
export const showOwners = (item, part) => {
  const box = item.querySelector(".owners");
  item.querySelector("button").setAttribute("aria-expanded", String(part !== null));
  box.hidden = part === null;
  if (part === null) { box.replaceChildren(); return; }
  const rows = part.owners.map(({ name, shown }) => make("li", {}, make("span", { class: "name" }, name), make("span", { class: "size" }, shown)));
  box.replaceChildren(make("p", {}, part.what), ...(rows.length ? [make("ul", { "aria-label": "Owners" }, ...rows)] : []));
};

// A diff line by line; colours repeat what the signs say.
export const showDiff = (element, diff) => {
  const kinds = { "+": "added", "-": "removed", "@": "place" };
  element.replaceChildren(...diff.replace(/\n$/, "").split("\n").map((line) => make("span", { class: /^(\+\+\+|---)/.test(line) ? "place" : kinds[line[0]] ?? "" }, `${line}\n`)));
};
