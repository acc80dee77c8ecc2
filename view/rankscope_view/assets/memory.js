// Choices of the reader that a browser keeps. Where it refuses this, for example in a sandboxed frame, nothing is kept.

/**
 * Return a choice that was kept, or null.
 * @param {string} name
 * @returns {string | null}
 */
export function recall(name) {
  try {
    return localStorage.getItem(`rankscope-${name}`);
  } catch {
    return null;
  }
}

/**
 * Keep a choice in the browser.
 * @param {string} name
 * @param {string} value
 */
export function keep(name, value) {
  try {
    localStorage.setItem(`rankscope-${name}`, value);
  } catch {
    // not permitted here
  }
}

/**
 * Show the query `search` in the address of the page, without loading it again.
 * @param {string} search
 */
export function setAddress(search) {
  try {
    history.replaceState(null, "", search ? `?${search}` : location.pathname);
  } catch {
    // not permitted here
  }
}
