// Text of models, as it is: nothing hidden, nothing that acts.

import { el } from "../dom.js";

const NAMES = {
  0x7f: "DEL", 0xad: "SHY", 0x61c: "ALM", 0x180e: "MVS", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM",
  0x2028: "LSEP", 0x2029: "PSEP", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO",
  0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};
// Controls, zero-width and bidirectional marks, tags, lone surrogates, private use.
const HIDDEN = /([\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029])/u;

const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

/** A hidden character's symbol: `⟨NUL⟩`, `⟨RLO⟩` for an override, `⏎` for a line break. */
function symbol(character) {
  const code = character.codePointAt(0);
  if (code === 0x0a) return "⏎";
  if (code === 0x09) return "⇥";
  return `⟨${CONTROLS[code] ?? NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`}⟩`;
}

/** `text` as nodes: hidden characters are symbols; a line break is one too where `lines`. */
export function visible(text, lines = false) {
  if (!HIDDEN.test(text)) return [text];
  return text.split(HIDDEN).filter(Boolean).map((piece) => {
    if (!HIDDEN.test(piece)) return piece;
    const mark = el("span", { class: piece === "\n" ? "ctl break" : "ctl" }, symbol(piece));
    if (piece === "\n" && lines) return [mark, "\n"];
    return piece === "\t" && lines ? [mark, "\t"] : mark;
  }).flat();
}

/** A token's text where nothing stands around it: its spaces are symbols too. */
export const token = (text) => el("bdi", { class: "text", dir: "ltr" }, text.split(/( )/).filter(Boolean)
  .map((piece) => (piece === " " ? el("span", { class: "ctl" }, "␣") : visible(piece))));

/** `text` in an element of its own, whose direction nothing outside feels. */
export const said = (text, attributes = {}, lines = false) => el("bdi", { dir: "ltr", ...attributes }, visible(text ?? "", lines));
