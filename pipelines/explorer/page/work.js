// Patterns that are tried, heads that are marked for them, and the plan that is made of these.

import { isSaved, post } from "./api.js";
import { $ } from "./dom.js";
import { paint } from "./heads.js";
import { listDecisions } from "./panels.js";
import { colour, colourPattern, isSame, page, problem } from "./page.js";
import { decisions, view, writeAddress } from "./state.js";

let awaited = ""; // the pattern whose measurement is to be shown when it is done, unless something else was chosen since

export function forget() {
  awaited = "";
}

// Measure the pattern in the field on all examples.  refresh(): reads what is known of the heads.
export async function tryPattern(refresh) {
  const text = $("pattern").value.trim();
  $("pattern-problem").textContent = "";
  if (!text) {
    return;
  }
  try {
    const name = isSaved ? text : (await post("api/patterns", { pattern: text })).name;
    if (page.sides.some((side) => side.heads?.patterns.includes(name))) {
      colourBy(`on ${name}`);
    } else if (isSaved) {
      $("pattern-problem").textContent = "This page was saved, and measures nothing; `guide discover serve` does.";
    } else {
      awaited = name;
      waitFor(name, refresh);
    }
  } catch (error) {
    problem("pattern-problem", error);
  }
}

async function waitFor(name, refresh) {
  while (awaited === name) {
    await new Promise((done) => setTimeout(done, 150));
    if ($("gone") || page.overview.problem) {
      return;
    }
    if (page.overview.state.phase === "ready") {
      await refresh();
    }
    if (awaited === name && page.sides[0].heads?.patterns.includes(name)) {
      colourBy(`on ${name}`);
    }
  }
}

// Colour heads by another measure.
export function colourBy(measure) {
  awaited = "";
  view.colour = measure;
  writeAddress(true);
  $("colour").value = colour();
  paint();
  page.listTop();
}

export function mark(head) {
  if (isSaved) {
    return;
  }
  const pattern = $("pattern").value.trim() || colourPattern();
  if (!pattern) {
    $("accept-problem").textContent = "Choose or write a pattern first; the head is then marked for it.";
    $("pattern").focus();
    return;
  }
  $("accept-problem").textContent = "";
  const known = decisions.findIndex((each) => isSame(each, head));
  const is = known >= 0 && decisions[known].pattern === pattern;
  if (known >= 0) {
    decisions.splice(known, 1);
  }
  if (!is) {
    decisions.push({ layer: head.layer, head: head.head, kind: head.kind, pattern });
  }
  writeAddress(true);
  showDecisions();
}

export function showDecisions() {
  listDecisions($("decisions"), decisions, page.choose, (decision) => {
    decisions.splice(decisions.indexOf(decision), 1);
    writeAddress(true);
    showDecisions();
  });
  offerAccept();
  paint();
}

// Nothing can be accepted while work is done, which the button has to know at every look at the state: a plan is soon made.
export function offerAccept() {
  $("accept").disabled = !page.overview.can_accept || decisions.length === 0 || page.overview.state.phase !== "ready";
}

export async function accept(event) {
  event.preventDefault();
  $("accept-problem").textContent = "";
  const marked = { decisions, into: $("into").value, mechanism: $("mechanism").value, pal: $("pal").checked };
  $("accept").disabled = true;
  try {
    await post("api/accept", marked);
  } catch (error) {
    problem("accept-problem", error);
    offerAccept();
  }
}

export function showAccepted() {
  const made = page.overview.accepted;
  const isNew = made && $("accepted-reference").textContent !== made.reference;
  $("accepted").hidden = !made;
  if (made) {
    $("accepted-reference").textContent = made.reference;
    $("accepted-command").textContent = made.command;
    $("accepted-plan").textContent = made.plan;
    if (isNew) {
      $("copied").textContent = "";
      $("accepted").scrollIntoView({ block: "nearest" });
    }
  }
}

export async function copyCommand() {
  const command = $("accepted-command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    $("copied").textContent = "copied";
  } catch { // the browser allows it only on pages of this machine
    getSelection().selectAllChildren(command);
    $("copied").textContent = "selected; copy it with the keyboard";
  }
}

