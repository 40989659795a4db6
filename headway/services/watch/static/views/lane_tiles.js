// Windows of a trace at a resolution, kept: a tile is 2^level seconds of some tracks, and a view finds the sharpest there is.

const MOST_TILES = 96; // kept in memory
const PIXELS = 2048; // spans of a tile and track, at most
const TRACKS = 100; // of one request

/** The first place of a sorted array whose value is above `at`. */
export function above(values, at) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The level whose tiles are at least half as wide as a view, and at most as wide. */
const levelOf = (span) => Math.ceil(Math.log2(span)) - 1;

export class LaneTiles {
  /** `ask(from, to, pixels, tracks)` gets a window, in seconds since the trace's start; `changed(error)`: there is more. */
  constructor(ask, changed) {
    Object.assign(this, { ask, changed, top: -Infinity });
    this.tiles = new Map(); // "level:place" -> {level, place, tracks: Map(track -> spans), asked: Map(track -> age)}
    this.age = 0; // grows with the trace: older tiles are drawn until newer ones are there
  }

  /** Ask for what a view of `tracks` lacks, and for the whole, coarsely: it is what is drawn until the rest is there. */
  want(view, tracks, whole) {
    const level = levelOf(view.to - view.from);
    this.top = Math.max(this.top, level, levelOf(whole) + 1);
    this.load(this.top, 0, tracks);
    const width = 2 ** level;
    for (let place = Math.max(0, Math.floor(view.from / width)); place * width < Math.min(view.to, whole); place += 1) {
      this.load(level, place, tracks);
    }
  }

  load(level, place, wanted) {
    const key = `${level}:${place}`;
    const tile = this.tiles.get(key) ?? { level, place, tracks: new Map(), asked: new Map() };
    this.tiles.delete(key);
    this.tiles.set(key, tile); // the last used one is the last
    for (const [old, { level: of }] of this.tiles) if (this.tiles.size > MOST_TILES && of !== this.top) this.tiles.delete(old);
    const tracks = wanted.filter((track) => tile.asked.get(track) !== this.age).slice(0, TRACKS);
    if (!tracks.length) return;
    for (const track of tracks) tile.asked.set(track, this.age);
    this.ask(place * 2 ** level, (place + 1) * 2 ** level, PIXELS, tracks).then((found) => {
      for (const [track, spans] of Object.entries(found.tracks)) tile.tracks.set(Number(track), spans);
      this.changed();
    }, (error) => {
      if (error.name !== "AbortError") this.changed(error);
    });
  }

  /** Call `each(spans, offset, from, to)` with the sharpest spans there are for each part of a track's view; those of
   * `spans` count from `offset`, and may reach beyond the part. */
  parts(track, { from, to }, each) {
    const level = levelOf(to - from);
    const levels = [level, level - 1, level - 2];
    for (let coarser = level + 1; coarser <= this.top; coarser += 1) levels.push(coarser);
    const width = 2 ** (level - 2);
    let part = null;
    for (let place = Math.max(0, Math.floor(from / width)); place * width < to; place += 1) {
      let tile;
      for (const of of levels) {
        tile = this.tiles.get(`${of}:${Math.floor(place * 2 ** (level - 2 - of))}`);
        if (tile?.tracks.has(track)) break;
      }
      const until = Math.min(to, (place + 1) * width);
      const spans = tile?.tracks.get(track);
      if (part && part.spans === spans) {
        part.to = until;
        continue;
      }
      if (part) each(part.spans, part.offset, part.from, part.to);
      part = spans ? { spans, offset: tile.place * 2 ** tile.level, from: Math.max(from, place * width), to: until } : null;
    }
    if (part) each(part.spans, part.offset, part.from, part.to);
  }

  /** The span of a track at a moment of a view; undefined: nothing. */
  at(track, moment, view) {
    let found;
    this.parts(track, view, (spans, offset, from, to) => {
      const place = above(spans.end, moment - offset);
      if (moment < from || moment >= to || !(spans.start[place] <= moment - offset)) return;
      const { name, share, number, member } = spans;
      found = { name: name[place], share: share[place], number: number?.[place] ?? -1, member: member?.[place] ?? -1 };
      Object.assign(found, { start: spans.start[place] + offset, end: spans.end[place] + offset });
    });
    return found;
  }

  /** Seconds of work of a track in a view, and how long each name took. */
  busyIn(track, view) {
    const [found, names] = [{ work: 0 }, new Map()];
    this.parts(track, view, ({ start, end, share, name }, offset, from, to) => {
      for (let place = above(end, from - offset); place < end.length && start[place] < to - offset; place += 1) {
        const took = Math.min(end[place], to - offset) - Math.max(start[place], from - offset);
        found.work += took * share[place];
        names.set(name[place], (names.get(name[place]) ?? 0) + took * (share[place] || 1));
      }
    });
    return { ...found, names };
  }
}
