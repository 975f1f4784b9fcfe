"use strict";
// Changes what has changed and leaves the rest: focus, selection, scrolling, what is folded.
(() => {
  const main = document.getElementById("content"), live = document.getElementById("live");
  document.documentElement.classList.add("script");
  const filter = () => {
    for (const input of main.querySelectorAll(".filter input")) {
      const words = input.value.toLowerCase().split(/\s+/);
      const rows = [...input.closest("section").querySelectorAll("tbody tr:not(.note)")];
      let shown = 0;
      for (const row of rows) {
        const note = row.nextElementSibling?.matches(".note") ? row.nextElementSibling : null;
        const text = (row.textContent + (note ? note.textContent : "")).toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        if (note) note.hidden = row.hidden;
        if (!row.hidden) shown += 1;
      }
      const output = input.closest("p").querySelector("output");
      const said = input.value ? `${shown} of ${rows.length}` : "";
      if (output.textContent !== said) output.textContent = said;
    }
  };
  const copy = async (button) => {
    const command = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch {  // without HTTPS there is no clipboard; what is selected can be copied by hand, too
      getSelection().selectAllChildren(command);
      if (!document.execCommand("copy")) return;
    }
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 2000);
  };
  main.addEventListener("input", filter);
  main.addEventListener("click", (event) => event.target.matches(".copy") && copy(event.target));
  if (!live || !window.EventSource) return;
  const OWN = ["open", "hidden"];  // what a reader has set
  const become = (old, fresh) => {
    if (old.nodeName !== fresh.nodeName || old.id !== fresh.id) return old.replaceWith(fresh);
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && !OWN.includes(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (!OWN.includes(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    if (old.nodeName !== "OUTPUT") children(old, fresh);
  };
  const children = (old, fresh) => {
    const wanted = [...fresh.childNodes];
    const named = new Map([...old.children].filter((each) => each.id).map((each) => [each.id, each]));
    wanted.forEach((each, at) => {
      const same = named.get(each.id);
      if (same && old.childNodes[at] !== same) old.insertBefore(same, old.childNodes[at] || null);
      if (!old.childNodes[at]) old.append(each);
      else if (each.id && !same) old.insertBefore(each, old.childNodes[at]);
      else become(old.childNodes[at], each);
    });
    while (old.childNodes.length > wanted.length) old.lastChild.remove();
  };
  const show = (html) => {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const before = document.getElementById("headline")?.textContent;
    children(main, fresh.content);
    filter();
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
