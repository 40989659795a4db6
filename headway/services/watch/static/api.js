// The server's answers. Everything is read: there is no request that changes anything.

import { el, fill } from "./dom.js";
import * as recorded from "./recorded.js";

/** What the server refused or couldn't read, in words. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return `api/${path}${text ? `?${text}` : ""}`;
}

/** GET api/`path` as JSON. Raises ApiError in words; an aborted request raises AbortError. */
export async function get(path, params = {}, { signal } = {}) {
  if (recorded.inside) {
    const found = await recorded.answer(path, params);
    if (found.error) throw new ApiError(found.error, 404);
    return structuredClone(found);
  }
  let answer;
  try {
    answer = await fetch(address(path, params), { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server of this page doesn't answer. Is `headway watch` still running?", 0);
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new ApiError(body?.error ?? `The server answered ${answer.status}.`, answer.status);
  if (body === null) throw new ApiError("The server's answer can't be read.", answer.status);
  return body;
}

/** Listen to the server: `handlers` by event name get its data; `onState(connected, error)` hears of lost
 * connections, which are tried again, and of what the server couldn't read. Returns a function that ends it. */
export function stream(params, handlers, onState = () => {}) {
  if (recorded.inside) return () => {};
  let source = null;
  let again = null;
  let closed = false;
  const open = () => {
    source = new EventSource(address("stream", params));
    source.onopen = () => onState(true);
    source.onerror = () => {
      onState(false);
      if (source.readyState === EventSource.CLOSED && !closed) again = setTimeout(open, 5000);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        const data = JSON.parse(event.data);
        if (data.error) onState(true, data.error);
        else handle(data);
      });
    }
  };
  open();
  return () => {
    closed = true;
    clearTimeout(again);
    source.close();
  };
}

/** Do `work`, and where it fails say why in `place`, with a button to try again. Returns its result, or undefined. */
export async function attempt(place, work) {
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (!(error instanceof ApiError)) console.error(error);
    const again = el("button", { type: "button", onclick: () => attempt(fill(place), work) }, "Try again");
    fill(place, el("div", { class: "problems", role: "alert" }, el("p", { class: "problem" }, error.message, " ", again)));
    return undefined;
  }
}
