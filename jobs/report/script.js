"use strict";
(() => {
  let lit = [];
  const light = (from) => {
    lit.forEach((element) => element.classList.remove("on"));
    lit = [];
    if (!from) return;
    const id = from.id || from.hash.slice(1), number = id.split("-")[1], card = from.closest(".card");
    const row = document.getElementById(id);
    lit.push(...card.querySelectorAll(`.answer a[href="#${id}"]`));
    lit.push(...[...card.querySelectorAll("mark")].filter((mark) => mark.dataset.n.split(" ").includes(number)));
    if (row) {
      lit.push(row);
      const link = row.querySelector("a");
      if (link) lit.push(document.getElementById(link.hash.slice(1)));
    }
    lit.forEach((element) => element.classList.add("on"));
  };
  const sentence = (event) => event.target.closest(".card .answer a, .rows tr[id]");
  document.addEventListener("mouseover", (event) => light(sentence(event)));
  document.addEventListener("focusin", (event) => light(sentence(event)));
  document.addEventListener("click", () => lit.forEach((element) => {
    const folded = element.closest("details");
    if (folded) folded.open = true;
  }));
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
