"use strict";
// The link's token stands behind the #: it is sent once, in a body, and is in no log.
async function logIn(token, path) {
  const said = document.getElementById("login");
  history.replaceState(null, "", path);
  try {
    const options = {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({token})};
    const answer = await fetch(path, options);
    if (answer.ok) { location.replace("./"); return; }
    said.textContent = (await answer.json()).error.message;
  } catch (error) {
    said.textContent = `The server does not answer: ${error.message}`;
  }
}

if (location.hash.length > 1) logIn(location.hash.slice(1), location.pathname);
