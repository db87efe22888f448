// Asks the server, or, on a page that was saved to one file, the data in it.

const saved = document.getElementById("guide-data");
const answers = saved ? JSON.parse(saved.textContent) : null;

export const isSaved = answers !== null;

// Whether a saved page has an answer to a question; a server always has one.
export function has(path) {
  return !isSaved || path in answers;
}

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Gives the token of the address for a cookie, and takes it out of the address and the history.
export async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (isSaved || !token) {
    return;
  }
  const rest = new URLSearchParams(location.hash.slice(1));
  rest.delete("token");
  history.replaceState(null, "", `#${rest}`);
  await post("api/session", { token });
}

// The body of the answer, as the method `kind` of Response reads it.  A server that ends before or within its answer is gone.
async function ask(path, kind, options) {
  let [response, body] = [null, null];
  try {
    response = await fetch(path, options);
    body = response.ok ? await response[kind]() : null;
  } catch {
    throw new Error("gone");
  }
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Refused(`${told.problem ?? `error ${response.status}`}${told.hint ? ` (${told.hint})` : ""}`, response.status);
  }
  return body;
}

export async function json(path) {
  if (isSaved) {
    return structuredClone(answers[path]);
  }
  return ask(path, "json");
}

export async function bytes(path) {
  if (isSaved) {
    return Uint8Array.from(atob(answers[path]), (letter) => letter.charCodeAt(0));
  }
  return new Uint8Array(await ask(path, "arrayBuffer"));
}

export async function post(path, value) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value) };
  return ask(path, "json", options);
}
