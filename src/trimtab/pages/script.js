"use strict";
// Values under the pointer and under the keyboard's focus. Without this script the page has titles and tables.
(() => {
  const tip = document.getElementById("tip");
  let shown = null;
  for (const title of document.querySelectorAll(".mark > title")) title.remove();

  const hide = () => {
    if (shown) shown.classList.remove("now");
    shown = null;
    tip.style.display = "none";
    tip.textContent = "";
  };

  const show = (mark) => {
    if (mark === shown) return;
    hide();
    shown = mark;
    mark.classList.add("now");
    tip.textContent = mark.getAttribute("aria-label");
    tip.style.display = "block";
    const at = mark.getBoundingClientRect();
    const middle = at.left + at.width / 2 - tip.offsetWidth / 2;
    const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = at.top - tip.offsetHeight - 10;
    tip.style.left = `${Math.max(8, Math.min(middle, most)) + window.scrollX}px`;
    tip.style.top = `${(above > 4 ? above : at.bottom + 10) + window.scrollY}px`;
  };

  const move = (mark, way) => {
    const all = [...mark.closest("svg").querySelectorAll(".mark")];
    const at = all.indexOf(mark);
    const to = { first: 0, last: all.length - 1, on: Math.min(at + 1, all.length - 1), back: Math.max(at - 1, 0) }[way];
    mark.setAttribute("tabindex", "-1");
    all[to].setAttribute("tabindex", "0");
    all[to].focus();
  };

  const keys = {
    ArrowRight: "on", ArrowDown: "on", ArrowLeft: "back", ArrowUp: "back", Home: "first", End: "last",
  };
  const markOf = (event) => (event.target.closest ? event.target.closest(".mark") : null);

  document.addEventListener("pointerover", (event) => {
    const mark = markOf(event);
    if (mark) show(mark);
    else if (shown && document.activeElement !== shown) hide();
  });
  document.addEventListener("focusin", (event) => {
    const mark = markOf(event);
    if (mark) show(mark);
    else hide();
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    const mark = markOf(event);
    if (event.key === "Escape") hide();
    if (!mark || !(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(mark, keys[event.key]);
  });
})();
