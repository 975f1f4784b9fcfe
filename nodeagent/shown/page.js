"use strict";
// Replaces what has changed, block by block, so that focus, selection and scrolling stay.
(() => {
  const main = document.getElementById("content"), live = document.getElementById("live");
  if (!main || !live || !window.EventSource) return;
  const show = (html) => {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const before = document.getElementById("headline")?.textContent;
    const held = document.activeElement && document.activeElement.id;
    const ids = [...fresh.content.children].map((block) => block.id);
    for (const block of [...main.children]) if (!ids.includes(block.id)) block.remove();
    [...fresh.content.children].forEach((block, at) => {
      const old = document.getElementById(block.id);
      if (!old) main.insertBefore(block, main.children[at] || null);
      else {
        if (main.children[at] !== old) main.insertBefore(old, main.children[at] || null);
        if (old.outerHTML !== block.outerHTML) old.replaceWith(block);
      }
    });
    if (held && document.getElementById(held)) document.getElementById(held).focus({ preventScroll: true });
    const verdict = document.getElementById("verdict");
    if (verdict) document.title = verdict.dataset.title;
    // A screen reader hears a new headline, and nothing else of what changes.
    const now = document.getElementById("headline")?.textContent;
    if (now !== before) document.getElementById("spoken").textContent = now;
  };
  const connect = () => {
    const source = new EventSource("live");
    source.onmessage = (event) => {
      show(JSON.parse(event.data));
      document.body.className = "";
      live.textContent = "Live";
    };
    source.onerror = () => {
      document.body.className = "old";
      live.textContent = "The agent does not answer; what you see is from before. Trying again.";
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
    };
  };
  connect();
})();
