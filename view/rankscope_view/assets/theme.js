// Apply the theme that the reader chose, before the page is drawn.
"use strict";
(() => {
  try {
    const known = localStorage.getItem("rankscope-theme");
    if (known) document.documentElement.dataset.theme = known;
  } catch {
    // not permitted here, for example in a sandboxed frame
  }
})();
