// Loaded before the page is drawn, so that it is not drawn in the other theme first.
"use strict";
(() => {
  const kept = localStorage.getItem("leanq-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
