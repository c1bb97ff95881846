// The named readers of a session: what they send, say and remember. Times are arguments.

import assert from "node:assert/strict";
import test from "node:test";

import { ReaderSessions, WombatSession, decode, encode } from "../headrace.js";
import { random } from "./random.js";

const EPOCH = 1_700_000_000_000;
const READ = { topic: "t", reader: "r", start: "oldest", instance: 7, window: 1000 };

test("what is handled is told as a prefix", () => {
  const { grant, records, handle, sent, hear } = line();
  assert.deepEqual(grant(1, 0), [
    { kind: "reader", topic: "t", state: "active", serial: `${EPOCH}@0` },
    { kind: "stored", topic: "t", offset: 0 },
  ]);
  const [event] = records(0, 4);
  assert.deepEqual([event.ordinal, event.time, event.epoch], [0, 123, EPOCH]);
  assert.deepEqual(event.messages.map(({ offset }) => offset), [5, 10, 15, 20]);
  assert.deepEqual(Buffer.from(event.messages[0].payload).toString(), "x");
  handle(2, 1);
  assert.deepEqual(sent(), []);
  handle(0);
  assert.deepEqual(sent(), [["handled", { topic: "t", grant: 1, offset: 15, ordinal: 3 }]]);
  const stored = hear("stored", { grant: 1, offset: 15 });
  assert.deepEqual(stored, [{ kind: "stored", topic: "t", offset: 15 }]);
});

test("after a lost connection only what is new is delivered", () => {
  const { grant, records, handle, sent, reconnect } = line();
  grant(1, 0);
  records(0, 3);
  handle(0, 1);
  sent();
  reconnect();
  assert.deepEqual(grant(2, 1).map(({ state }) => state), ["active", undefined]);
  assert.deepEqual(sent(), [], "nothing may be acknowledged before it was sent again");
  const [event] = records(1, 3);
  assert.deepEqual([event.ordinal, event.messages.map(({ offset }) => offset)], [3, [20]]);
  assert.deepEqual(sent(), [["handled", { topic: "t", grant: 2, offset: 10, ordinal: 2 }]]);
});

test("a reader that another client has moved starts anew", () => {
  const { grant, records, handle, reconnect, readers } = line();
  grant(1, 0);
  records(0, 3);
  handle(0);
  reconnect();
  assert.deepEqual(grant(9, 2).map(({ state }) => state), ["lost", "active", undefined]);
  assert(!readers.handled("t", 10), "it is of the time before");
  assert.equal(records(2, 1)[0].messages.length, 1);
});

test("a superseded reader asks again, and may handle nothing", () => {
  const { grant, records, sent, hear, readers } = line();
  grant(1, 0);
  records(0, 2);
  const reason = "why";
  assert.deepEqual(hear("lost", { code: 1, reason }), [
    { kind: "reader", topic: "t", state: "lost", reason },
  ]);
  assert(!readers.handled("t", 5));
  assert.deepEqual(records(2, 1), []);
  assert.deepEqual(sent(), [["read", READ]]);
  assert.deepEqual(hear("waiting", { ahead: 1 }), [
    { kind: "reader", topic: "t", state: "waiting" },
  ]);
});

test("gaps are told, and records that make no sense end the connection", () => {
  const { grant, records, hear } = line();
  assert.deepEqual(grant(1, 2, false).at(-1), {
    ...{ kind: "missed", topic: "t", asked: "@10", got: `${EPOCH}@10` },
  });
  records(2, 1);
  assert.equal(records(5, 1)[0].asked, "@15");
  assert.equal(records(0, 1)[0].kind, "broken");
  const cutOff = { epoch: EPOCH, offset: 30, ordinal: 6, time: 0 };
  for (const bytes of [[0, 0, 0, 9, 1], [0, 0]]) {
    const [event] = hear("records", { ...cutOff, records: Uint8Array.from(bytes) });
    assert.equal(event.kind, "broken");
  }
});

test("a server that does not answer, or hangs up on READ, does not know readers", () => {
  const { readers, sent, reconnect } = line();
  assert.equal(readers.tickAt, ReaderSessions.ANSWER_MS);
  for (let left = ReaderSessions.HANG_UPS_MAX - 1; left > 0; left -= 1) reconnect();
  readers.disconnected();
  readers.opened(8);
  assert.deepEqual(sent(), []);
  assert.match(readers.tick(8)[0].reason, /does not know named readers/);

  const other = line();
  const [failed] = other.readers.tick(ReaderSessions.ANSWER_MS);
  assert.equal(failed.kind, "readerFailed");
  assert.deepEqual(other.sent(), [["detach", { topic: "t" }]]);
});

test("a server that has answered knows readers, however often it is cut off", () => {
  const { readers, hear, reconnect } = line();
  hear("waiting", { ahead: 1 });
  for (let left = 3 * ReaderSessions.HANG_UPS_MAX; left > 0; left -= 1) reconnect();
  assert.deepEqual(readers.tick(0), []);
});

test("a refused reader is said to have failed", () => {
  const { hear } = line();
  const [event] = hear("lost", { code: 2, reason: "too many" });
  assert.deepEqual(event, { kind: "readerFailed", topic: "t", reason: "too many" });
});

test("a topic is read again when the server has let go of it", () => {
  const session = new WombatSession();
  const sent = () => session.controlToSend(0).map((data) => decode(data).name);
  session.connecting();
  session.opened(0);
  session.read("t", { reader: "a", newest: false, window: 9 });
  assert.deepEqual(sent(), ["ping", "read"]);
  const at = { epoch: EPOCH, offset: 0, ordinal: 0 };
  readingOf(session, at);
  const records = Uint8Array.of(0, 0, 0, 1, 120);
  session.receive(encode("records", { topic: "t", ...at, time: 1, records }), 0);
  assert(session.handled("t", 5));
  assert(session.detach("t"));
  assert.deepEqual(sent(), ["handled", "detach"], "in this order");
  session.read("t", { reader: "b", newest: true, window: 9 });
  assert.deepEqual(sent(), []);
  const events = session.receive(encode("detached", { topic: "t" }), 0);
  assert.deepEqual(events, [{ kind: "detached", topic: "t" }]);
  assert.deepEqual(sent(), ["read"]);
});

test("a reader is sure for a while after an answered ping, while it is active", () => {
  const session = new WombatSession({ pingIntervalMs: 5000 });
  const pings = () =>
    session
      .controlToSend(0)
      .map((data) => decode(data))
      .filter(({ name }) => name === "ping");
  const answer = ({ timestamp }, now) => session.receive(encode("pong", { timestamp }), now);
  session.connecting();
  session.opened(1000);
  session.read("t", { reader: "a", newest: false, window: 9 });
  readingOf(session, { epoch: EPOCH, offset: 0, ordinal: 0 });
  assert(!session.isSure("t", 1000));
  const [first] = pings();
  // The process is stopped here, and the answer waits in its socket.
  session.makeSure(60_000);
  assert.deepEqual(pings(), [], "the server is being asked");
  assert.deepEqual(answer(first, 60_000), [{ kind: "answered" }]);
  assert(!session.isSure("t", 60_000), "the answer is old");
  session.makeSure(60_000);
  const [second] = pings();
  answer(second, 60_100);
  assert(session.isSure("t", 64_999));
  assert(!session.isSure("t", 65_000));
  session.receive(encode("lost", { topic: "t", code: 1, reason: "why" }), 61_000);
  assert(!session.isSure("t", 61_000), "another client reads");
  readingOf(session, { epoch: EPOCH, offset: 0, ordinal: 0 });
  assert(session.isSure("t", 61_000));
  session.disconnected();
  assert(!session.isSure("t", 61_000), "there is no connection");
});

test("what is stored was handled and never comes again, whatever happens", () => {
  for (let seed = 0; seed < 300; seed += 1) explore(random(seed).below);
});

/** Against a server of a few lines, whose connection breaks and which others read from as well. */
function explore(below) {
  const count = 12;
  const { readers, grant: give, records, sent, hear, reconnect } = line();
  let [cursor, told, seen, grant] = [0, 0, 0, 1];
  const held = new Set();
  const handled = new Set();
  const take = (events) => {
    for (const event of events) {
      if (event.state === "lost") held.clear();
      for (const { offset } of event.messages ?? []) {
        assert(offset / 5 > cursor);
        assert(!held.has(offset / 5));
        held.add(offset / 5);
      }
    }
  };
  const beginAgain = () => {
    [grant, seen, told] = [grant + 1, cursor, cursor];
    take(give(grant, cursor));
  };
  give(1, 0);
  for (let left = 40; left > 0; left -= 1) {
    const step = below(6);
    if (step === 0 && seen < count) {
      const some = Math.min(1 + below(5), count - seen);
      take(records(seen, some));
      seen += some;
    } else if (step <= 2 && held.size > 0) {
      const one = [...held][below(held.size)];
      held.delete(one);
      handled.add(one);
      assert(readers.handled("t", one * 5));
    } else if (step === 3 && told > cursor) {
      cursor = told;
      hear("stored", { grant, offset: cursor * 5 });
    } else if (step === 4) {
      reconnect();
      beginAgain();
    } else if (step === 5 && below(3) === 0) {
      reconnect();
      take(hear("waiting", { ahead: 1 }));
      cursor = Math.min(count, cursor + below(3));
      for (let n = 1; n <= cursor; n += 1) handled.add(n);
      beginAgain();
    }
    for (const [name, fields] of sent()) {
      assert.equal(name, "handled");
      assert.equal(fields.grant, grant);
      assert(told < fields.ordinal && fields.ordinal <= seen);
      for (let n = 1; n <= fields.ordinal; n += 1) assert(handled.has(n));
      told = fields.ordinal;
    }
  }
}

function readingOf(session, at) {
  // The codec of a client writes no booleans: this is what a server sends.
  const bytes = encode("reading", { topic: "t", grant: 1, asked: 0, exact: 0, ...at });
  const place = Buffer.from(bytes).indexOf("exact") + 5;
  bytes[place] = 0xc3;
  session.receive(bytes, 0);
}

/** Readers with the connection that a test plays the server of. */
function line() {
  const out = [];
  const readers = new ReaderSessions(7, (name, fields) => out.push([name, fields]));
  const sent = () => {
    readers.flush(0);
    return out.splice(0);
  };
  const hear = (name, fields) => readers.receive({ name, topic: "t", ...fields });
  readers.opened(0);
  readers.read("t", { reader: "r", newest: false, window: 1000 }, false);
  assert.deepEqual(sent(), [["read", READ]]);
  return {
    ...{ readers, sent, hear },
    grant: (grant, at, exact = true) => {
      const place = { epoch: EPOCH, offset: at * 5, ordinal: at };
      return hear("reading", { grant, asked: at * 5, exact, ...place });
    },
    records: (first, count) => {
      const records = new Uint8Array(Array.from({ length: count }, () => [0, 0, 0, 1, 120]).flat());
      const place = { epoch: EPOCH, offset: first * 5, ordinal: first };
      return hear("records", { ...place, time: 123, records });
    },
    handle: (...numbers) => {
      for (const number of numbers) assert(readers.handled("t", (number + 1) * 5));
    },
    reconnect: () => {
      readers.disconnected();
      readers.opened(0);
      assert.equal(sent().length, 1);
    },
  };
}
