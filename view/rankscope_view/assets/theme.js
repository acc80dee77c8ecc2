// Apply the theme that the reader chose, before the page is drawn.
"use strict";
(() => {
  const known = localStorage.getItem("rankscope-theme");
  if (known) document.documentElement.dataset.theme = known;
})();
