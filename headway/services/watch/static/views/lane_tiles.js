// Windows of a trace at a resolution, kept: a tile is 2^level seconds of some tracks, and each view finds the sharpest there is.

const MOST_SPANS = 3e6; // kept in memory
const PIXELS = 2048; // spans a tile and track, at most
const TRACKS = 100; // of one request

/** The first place of a sorted array whose value is above `at`. */
function above(values, at) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

export class LaneTiles {
  /** `ask(from_s, to_s, pixels, tracks)` gets a window, seconds since the trace's start; `changed()` when there is more. */
  constructor(ask, changed) {
    this.ask = ask;
    this.changed = changed;
    this.tiles = new Map(); // "level:place" -> {level, place, tracks: Map(track -> spans), asked: Map(track -> age)}
    this.age = 0; // of the trace: tiles from before it grew are drawn until newer ones are here
    this.busy = 0;
  }

  grown() {
    this.age += 1;
  }

  /** The level whose tiles are half as wide as a view, or up to all of it. */
  levelOf(span) {
    return Math.ceil(Math.log2(span)) - 1;
  }

  /** Ask for what a view of `tracks` lacks, the coarse tile of `whole` seconds first. Returns whether that was anything. */
  want(view, tracks, whole) {
    const level = this.levelOf(view.to - view.from);
    const top = Math.max(level, this.levelOf(whole) + 1);
    this.top = Math.max(this.top ?? top, top);
    const width = 2 ** level;
    const wanted = [[top, 0]];
    for (let place = Math.max(0, Math.floor(view.from / width)); place * width < Math.min(view.to, whole); place += 1) {
      if (level !== top) wanted.push([level, place]);
    }
    let asked = false;
    for (const [of, place] of wanted) {
      const tile = this.tile(of, place);
      const lacking = tracks.filter((track) => tile.asked.get(track) !== this.age);
      for (let at = 0; at < lacking.length; at += TRACKS) asked = this.load(tile, lacking.slice(at, at + TRACKS)) || asked;
    }
    return asked;
  }

  tile(level, place) {
    const key = `${level}:${place}`;
    const tile = this.tiles.get(key) ?? { level, place, tracks: new Map(), asked: new Map(), spans: 0 };
    this.tiles.delete(key); // the last used one is the last
    this.tiles.set(key, tile);
    return tile;
  }

  load(tile, tracks) {
    if (!tracks.length) return false;
    const age = this.age;
    const width = 2 ** tile.level;
    for (const track of tracks) tile.asked.set(track, age);
    this.busy += 1;
    this.ask(tile.place * width, (tile.place + 1) * width, PIXELS, tracks).then((found) => {
      for (const [track, spans] of Object.entries(found.tracks)) {
        tile.spans += spans.start.length - (tile.tracks.get(Number(track))?.start.length ?? 0);
        tile.tracks.set(Number(track), spans);
      }
      this.forget();
    }).catch((error) => {
      for (const track of tracks) tile.asked.delete(track);
      if (error.name !== "AbortError") this.failed = error;
    }).finally(() => {
      this.busy -= 1;
      this.changed();
    });
    return true;
  }

  forget() {
    let total = [...this.tiles.values()].reduce((sum, tile) => sum + tile.spans, 0);
    for (const [key, tile] of this.tiles) {
      if (total <= MOST_SPANS) return;
      if (tile.level === this.top) continue;
      this.tiles.delete(key);
      total -= tile.spans;
    }
  }

  /** Call `each(spans, offset, from, to)` with the sharpest spans there are for each part of a track's view; those of
   * `spans` count from `offset`. */
  parts(track, from, to, each) {
    const level = this.levelOf(to - from);
    const width = 2 ** level;
    for (let place = Math.max(0, Math.floor(from / width)); place * width < to; place += 1) {
      for (let [of, at] = [level, place]; of <= (this.top ?? level); of += 1, at = Math.floor(at / 2)) {
        const spans = this.tiles.get(`${of}:${at}`)?.tracks.get(track);
        if (!spans) continue;
        each(spans, at * 2 ** of, Math.max(from, place * width), Math.min(to, (place + 1) * width));
        break;
      }
    }
  }

  /** The span of a track at a moment, as {name, start, end, share, number, member}; undefined: nothing. */
  at(track, moment, view) {
    let found;
    this.parts(track, view.from, view.to, (spans, offset, from, to) => {
      if (moment < from || moment >= to) return;
      const place = above(spans.end, moment - offset);
      if (spans.start[place] > moment - offset || place === spans.end.length) return;
      const value = (name) => spans[name]?.[place] ?? -1;
      found = { name: spans.name[place], share: spans.share[place], number: value("number"), member: value("member") };
      found.start = spans.start[place] + offset;
      found.end = spans.end[place] + offset;
    });
    return found;
  }

  /** Seconds of work of a track in a view, and by name what took how long. */
  busyIn(track, view) {
    let work = 0;
    const names = new Map();
    this.parts(track, view.from, view.to, (spans, offset, from, to) => {
      for (let place = above(spans.end, from - offset); place < spans.end.length && spans.start[place] < to - offset; place += 1) {
        const took = Math.min(spans.end[place], to - offset) - Math.max(spans.start[place], from - offset);
        work += took * spans.share[place];
        names.set(spans.name[place], (names.get(spans.name[place]) ?? 0) + took * (spans.share[place] || 1));
      }
    });
    return { work, names };
  }
}

export { above };
