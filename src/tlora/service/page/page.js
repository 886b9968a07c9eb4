"use strict";
// Every two seconds the page is asked for again, and what has changed is put in place. The server makes all HTML, with names escaped.
const EVERY_MS = 2000;

function say(text) {
  const note = document.getElementById("note");
  note.hidden = !text;
  note.textContent = text;
}

function put(fresh) {
  const shown = document.querySelector("main");
  if (!fresh || fresh.innerHTML === shown.innerHTML) return;
  const focused = shown.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  shown.replaceWith(fresh);
  for (const link of focused ? fresh.querySelectorAll("a") : []) {
    if (link.getAttribute("href") === focused) { link.focus({preventScroll: true}); break; }
  }
}

async function refresh() {
  if (!document.hidden && !String(document.getSelection())) {  // a text that is being copied stays
    try {
      const answer = await fetch(location.href, {headers: {Accept: "text/html"}, cache: "no-store"});
      if (answer.status === 401) { location.reload(); return; }
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      put(new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main"));
      say("");
    } catch (error) {
      say(`This is not up to date: ${error.message}. It is tried again.`);
    }
  }
  setTimeout(refresh, EVERY_MS);
}

setTimeout(refresh, EVERY_MS);
