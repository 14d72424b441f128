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

// A part keeps its element from answer to answer, so that it keeps the focus.
export const showParts = (list, parts) => {
  const known = new Map([...list.children].map((item) => [item.dataset.part, item]));
  const items = parts.map(({ name, shown, share }) => {
    let item = known.get(name);
    if (!item) {
      const cells = [
        make("span", { class: `swatch ${name}`, "aria-hidden": "true" }), make("span", { class: "name" }, name),
        make("span", { class: "size" }), make("span", { class: "share" }),
      ];
      item = make("li", { "data-part": name }, make("div", { class: "part" }, ...cells));
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
