// The session of a channel: messages and times go in, messages and events come out. No sockets.

import assert from "node:assert/strict";
import test from "node:test";

import { ChannelSession, contentOf, decodeMessage } from "../channel_session.js";
import { CodecError, PayloadTooLargeError } from "../headrace.js";
import { random } from "./random.js";

test("a connection says who it is and joins, and counts when it is joined", () => {
  const { session, said, hear } = member({ token: "secret", receive: "signal" });
  session.connecting();
  session.opened(0);
  assert.deepEqual(said(), [
    { type: "hello", processor: "a", token: "secret" },
    { type: "join", channel: "c", receive: "signal" },
  ]);
  hear({ type: "welcome", processor: "a", version: 1, ping_s: 15 });
  assert.equal(session.state, "connecting");
  hear(joined());
  assert.equal(session.state, "connected");
});

test("messages are numbered from the last accepted one on, and sent without waiting", () => {
  const { session, said, hear, reconnect } = member();
  const first = session.send(content("x"));
  session.send(content("y"));
  assert.deepEqual(said(), []);
  reconnect({ number: 7 });
  assert.deepEqual(sends(said()), ["8 x", "9 y"]);
  assert.deepEqual(hear(sent(8, 22)), [answer(first, 22)]);
  session.send(content("z"));
  assert.deepEqual(sends(said()), ["10 z"]);
  assert.equal(session.unacknowledged, 2);
});

test("after a reconnect what was accepted is not sent again, all else is, in order", () => {
  const { session, said, reconnect } = member({ joined: {} });
  const [w, x] = ["w", "x", "y"].map((text) => session.send(content(text)));
  assert.deepEqual(sends(said()), ["1 w", "2 x", "3 y"]);
  session.disconnected();
  session.send(content("z"));
  const events = reconnect({ number: 2 });
  assert.deepEqual(events, [answer(w, null), answer(x, null)]);
  assert.deepEqual(sends(said()), ["3 y", "4 z"]);
});

test("a server that has forgotten the numbers gets new ones", () => {
  const { session, said, hear, reconnect } = member({ joined: { number: 5 } });
  session.send(content("x"));
  session.send(content("y"));
  said();
  hear(sent(6));
  session.disconnected();
  assert.deepEqual(reconnect({ number: 0 }), []);
  assert.deepEqual(sends(said()), ["1 y"]);
});

test("a duplicate counts as accepted, with its offset or without", () => {
  const { session, said, hear } = member({ joined: {} });
  const [x, y] = ["x", "y"].map((text) => session.send(content(text)));
  said();
  assert.deepEqual(hear({ ...sent(1, 22), duplicate: true }), [answer(x, 22)]);
  assert.deepEqual(hear({ ...sent(2), duplicate: true }), [answer(y, null)]);
  assert.equal(session.unacknowledged, 0);
});

test("what is refused for good leaves its number to the next, when all are answered", () => {
  const { session, said, hear } = member({ joined: {} });
  const [, bad] = ["w", "bad", "y", "z"].map((text) => session.send(content(text)));
  said();
  const [event] = hear(refusal("send", "cannot-fold", { number: 2 }));
  assert.deepEqual([event.kind, event.asked, event.error.code], ["refused", bad, "cannot-fold"]);
  hear(refusal("send", "gap", { number: 3, retry: true }));
  session.send(content("later"));
  hear(sent(1, 22));
  assert.deepEqual(said(), [], "the last answer could be mistaken for that of another message");
  assert.deepEqual(hear(refusal("send", "gap", { number: 4, retry: true })), []);
  assert.deepEqual(sends(said()), ["2 y", "3 z", "4 later"]);
  assert.equal(session.unacknowledged, 3);
});

test("what may be tried again is, after a while, and nothing overtakes it", () => {
  const { session, said, hear, pass } = member({ joined: {}, retryMs: 500 });
  for (const text of ["x", "y"]) session.send(content(text));
  said();
  hear(refusal("send", "unavailable", { number: 1, retry: true }), 1000);
  hear(refusal("send", "gap", { number: 2, retry: true }), 1000);
  assert.deepEqual(said(1499), []);
  assert.equal(session.tickAt, 1500);
  pass(1500);
  assert.deepEqual(sends(said(1500)), ["1 x", "2 y"]);
});

test("a gap that nothing explains is left by joining again", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  session.send(content("x"));
  said();
  const events = hear(refusal("send", "gap", { number: 1, retry: true }));
  assert.deepEqual(events, [{ kind: "broken", reason: "the server expects another number" }]);
  session.disconnected();
  assert.deepEqual(reconnect({ number: 4 }), [], "a gap was never stored, whatever its number");
  assert.deepEqual(sends(said()), ["5 x"]);
});

test("a connection lost while refusals are waited for keeps the order", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  const [w] = ["w", "bad", "y", "z"].map((text) => session.send(content(text)));
  said();
  hear(refusal("send", "cannot-fold", { number: 2 }));
  hear(refusal("send", "gap", { number: 4, retry: true }));
  session.disconnected();
  assert.deepEqual(reconnect({ number: 1 }), [answer(w, null)]);
  assert.deepEqual(sends(said()), ["2 y", "3 z"]);
});

test("answers to what was never sent break the connection", () => {
  const { hear } = member({ joined: {} });
  assert.equal(hear(sent(1))[0].kind, "broken");
  assert.equal(hear(refusal("send", "gap", { number: 1, retry: true }))[0].kind, "broken");
});

test("no more is under way than the window holds", () => {
  const { session, said, hear } = member({ joined: {}, windowMax: 2 });
  for (const text of ["x", "y", "z"]) session.send(content(text));
  assert.deepEqual(sends(said()), ["1 x", "2 y"]);
  assert.equal(session.hasRoom, false);
  hear(sent(1));
  assert.deepEqual(sends(said()), ["3 z"]);
  hear(sent(2));
  assert.equal(session.hasRoom, true);
});

test("messages are given once and acknowledged when they are done, one ACK at a time", () => {
  const { session, said, hear } = member({ joined: {} });
  assert.deepEqual(offsets(hear(messages(10, 20, 30))), [10, 20, 30]);
  assert.deepEqual(said(), []);
  session.handled(10);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 10 }]);
  session.handled(20);
  session.handled(30);
  assert.deepEqual(said(), []);
  assert.equal(session.isFlushed, false);
  hear({ type: "acked", channel: "c", offset: 10 });
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 30 }]);
  hear({ type: "acked", channel: "c", offset: 30 });
  assert.equal(session.isFlushed, true);
});

test("what comes again on the next connection is not given again, only acknowledged", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  hear(messages(10, 20, 30));
  session.handled(10);
  session.disconnected();
  reconnect({ cursor: 0, end: 40 });
  session.handled(20);
  assert.deepEqual(said(), [], "nothing is acknowledged that this connection has not brought");
  assert.deepEqual(offsets(hear(messages(10, 20, 30, 40))), [40]);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 20 }]);
});

test("an ACK that is refused is covered by the next", () => {
  const { session, said, hear } = member({ joined: {} });
  hear(messages(10, 20));
  session.handled(10);
  said();
  assert.deepEqual(hear(refusal("ack", "bad-offset")), [{ kind: "acked" }]);
  session.handled(20);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 20 }]);
});

test("a signal is followed by a fetch when the application has nothing left to do", () => {
  const { session, said, hear } = member({ joined: {}, receive: "signal" });
  session.want(0);
  assert.deepEqual(said(), []);
  hear(signal());
  assert.deepEqual(said(), [{ type: "fetch", channel: "c" }]);
  assert.deepEqual(offsets(hear(messages(10, 20))), [10, 20]);
  session.handled(10);
  hear(signal());
  session.handled(20);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 10 }]);
  session.want(0);
  assert.deepEqual(said(), [{ type: "fetch", channel: "c", ack: 20 }]);
  hear(messages());
  assert.deepEqual(said(), []);
});

test("who polls asks again at once when more is pending, and else after the interval", () => {
  const polling = { receive: "poll", pollIntervalMs: 300 };
  const { session, said, hear, pass } = member({ joined: {}, ...polling });
  assert.deepEqual(said(), [], "nobody wants anything yet");
  session.want(0);
  assert.deepEqual(said(), [{ type: "fetch", channel: "c" }]);
  hear(messages(), 100);
  assert.deepEqual(said(), []);
  assert.equal(session.tickAt, 400);
  pass(400);
  assert.deepEqual(said(), [{ type: "fetch", channel: "c" }]);
  hear({ ...messages(10), more: true }, 410);
  session.handled(10);
  session.want(410);
  assert.deepEqual(
    said().map(({ type }) => type),
    ["ack", "fetch"],
  );
});

test("a snapshot is given before what is behind it, and acknowledged when it is restored", () => {
  const { session, said, hear, reconnect } = member();
  const snapshot = { offset: 88, epoch: 1, payload: "state" };
  const missed = { messages: 3, reason: "trimmed" };
  const events = reconnect({ cursor: 88, end: 110, start: 88, missed, snapshot });
  assert.deepEqual(events, [{ kind: "restore", snapshot, missed, offset: 88 }]);
  assert.deepEqual(offsets(hear(messages(110))), [110]);
  assert.deepEqual(said(), []);
  session.handled(88);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 88 }]);
});

test("behind a snapshot even that is given which was given before it", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  hear(messages(10, 20, 30));
  session.handled(20);
  session.disconnected();
  const snapshot = { offset: 10, epoch: 1, payload: "state" };
  reconnect({ cursor: 10, end: 30, start: 10, snapshot });
  assert.deepEqual(offsets(hear(messages(20, 30))), [20, 30]);
  assert.deepEqual(hear(messages(20, 30)), []);
  assert.deepEqual(said(), [], "neither the snapshot nor what is behind it is done");
});

test("a log that ends before what it has brought is another one, and that is told", () => {
  const { hear, reconnect, session } = member({ joined: {} });
  hear(messages(1000));
  session.handled(1000);
  session.disconnected();
  const missed = { messages: null, reason: "lost" };
  const expected = [{ kind: "restore", snapshot: null, missed, offset: 0 }];
  assert.deepEqual(reconnect({ end: 20 }), expected);
  assert.deepEqual(offsets(hear(messages(20))), [20]);
});

test("messages that the server has lost are told of", () => {
  const { hear } = member({ joined: {} });
  const events = hear({ ...messages(50), lost: 2 });
  assert.deepEqual(events[0], { kind: "lost", missed: { messages: 2, reason: "lost" } });
  assert.deepEqual(offsets(events.slice(1)), [50]);
});

test("requests are answered one after the other, and asked again on the next connection", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  const upload = session.upload(26, content("state"));
  const snapshot = session.snapshot();
  const expected = { type: "upload", channel: "c", offset: 26, payload: "state" };
  assert.deepEqual(said(), [expected]);
  session.disconnected();
  reconnect();
  assert.deepEqual(said(), [expected]);
  assert.deepEqual(hear({ type: "uploaded", channel: "c", offset: 26 }), [answer(upload, 26)]);
  assert.deepEqual(said(), [{ type: "snapshot", channel: "c" }]);
  const none = { type: "snapshot", channel: "c", snapshot: null };
  assert.deepEqual(hear(none), [answer(snapshot, null)]);
  assert.deepEqual(hear(none), [], "nobody has asked");
});

test("a request that is refused is over, or tried again when that can help", () => {
  const { session, said, hear, pass } = member({ joined: {}, retryMs: 500 });
  const upload = session.upload(26, content("state"));
  session.snapshot();
  said();
  const [{ kind, asked, error }] = hear(refusal("upload", "not-uploaded"));
  assert.deepEqual([kind, asked, error.code], ["refused", upload, "not-uploaded"]);
  assert.equal(said().length, 1);
  assert.deepEqual(hear(refusal("snapshot", "unavailable", { retry: true }), 1000), []);
  assert.deepEqual(said(), []);
  pass(1500);
  assert.deepEqual(said(), [{ type: "snapshot", channel: "c" }]);
});

test("who was replaced or is refused does not come again", () => {
  for (const [message, code, text] of [
    [left("replaced"), "replaced", 'another connection of "a" has joined the channel'],
    [left("left"), "left", '"a" has left the channel, over HTTP or on another connection'],
    [refusal("join", "forbidden"), "forbidden", "why"],
    [refusal(undefined, "wrong-credentials"), "wrong-credentials", "why"],
    [refusal(undefined, "bad-message"), "bad-message", "why"],
  ]) {
    const { hear } = member({ joined: {} });
    const [event, ...others] = hear(message);
    assert.deepEqual([event.kind, event.error.code, event.error.message], ["ended", code, text]);
    assert.deepEqual(others, []);
  }
});

test("who cannot join for now, or is a member no more, comes again", () => {
  for (const message of [
    refusal("join", "unavailable", { retry: true }),
    refusal("ack", "not-joined"),
    refusal("send", "not-joined", { number: 1 }),
  ]) {
    const { hear } = member({ joined: {} });
    assert.deepEqual(hear(message), [{ kind: "broken", reason: "why" }]);
  }
});

test("leaving is said again until it is answered, and without joining", () => {
  const { session, said, hear } = member({ joined: {} });
  session.leave();
  assert.deepEqual(said(), [{ type: "leave", channel: "c" }]);
  session.disconnected();
  session.connecting();
  session.opened(0);
  const types = said().map(({ type }) => type);
  assert.deepEqual(types, ["hello", "leave"]);
  assert.deepEqual(hear(left("left")), [{ kind: "left" }], "somebody else was faster");
  assert.deepEqual(hear(left()), [{ kind: "left" }]);
});

test("leaving while JOIN is under way waits for it", () => {
  const { session, said, hear } = member();
  session.connecting();
  session.opened(0);
  said();
  session.leave();
  assert.deepEqual(said(), []);
  hear(joined());
  assert.deepEqual(said(), [{ type: "leave", channel: "c" }]);
});

test("a silent connection is pinged, and given up when it stays silent", () => {
  const { session, said, hear, pass } = member({ joined: {} });
  assert.equal(session.tickAt, 5000);
  assert.deepEqual(pass(5000), []);
  assert.deepEqual(said(), [{ type: "ping" }]);
  hear({ type: "pong" }, 5012.5);
  assert.equal(session.latencyMs, 12.5);
  assert.deepEqual(pass(10_000), []);
  assert.deepEqual(said(), [{ type: "ping" }]);
  hear(signal(), 10_001);
  assert.deepEqual(pass(15_000), [], "anything heard counts");
  const reason = "nothing was heard for 5000 ms";
  assert.deepEqual(pass(20_000), [{ kind: "broken", reason }]);
});

test("a server that does not answer HELLO is given up", () => {
  const { session, pass } = member();
  session.connecting();
  session.opened(0);
  assert.equal(pass(5000)[0].kind, "broken");
});

test("the wait before an attempt doubles up to 10 s, until the channel is joined", () => {
  const { session, reconnect } = member();
  const waits = Array.from({ length: 9 }, () => session.disconnected());
  assert.deepEqual(waits, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
  session.connecting();
  session.opened(0);
  assert.equal(session.disconnected(), 10_000);
  reconnect();
  assert.equal(session.disconnected(), 100);
});

test("what is no message of this protocol breaks the connection", () => {
  const b64 = { ...messages(10), messages: [{ offset: 1, processor: "b", number: 1, bytes: "~" }] };
  const none = { ...messages(10), messages: [{ offset: 1, processor: "b", number: 1 }] };
  for (const data of [
    ...["", "[]", "null", "7", "{}", '{"type":7}', '{"type":"joined","cursor":"0"}'],
    ...['{"type":"messages","messages":{}}', '{"type":"messages","messages":[null]}'],
    ...['{"type":"messages","messages":[{"offset":1.5}]}', '{"type":"error"}', '{"type":"sent"}'],
    ...['{"type":"snapshot"}', '{"type":"snapshot","snapshot":{}}', JSON.stringify(b64)],
    ...[JSON.stringify(none), new Uint8Array(1).buffer],
  ]) {
    const { session } = member({ joined: {} });
    const [event] = session.receive(data, 0);
    assert.equal(event?.kind, "broken", String(data));
    assert.throws(() => decodeMessage(data), CodecError);
  }
});

test("what a newer server may say, and what is of another channel, is passed over", () => {
  const { hear } = member({ joined: {} });
  assert.deepEqual(hear({ type: "news", channel: "c" }), []);
  assert.deepEqual(hear({ ...left("replaced"), channel: "other" }), []);
  assert.deepEqual(offsets(hear({ ...messages(10), extra: 1 })), [10]);
});

test("bytes go as base64, everything else as JSON", () => {
  const all = Uint8Array.from({ length: 70_000 }, (_, index) => index);
  const encoded = contentOf(all, 100_000);
  const told = { type: "messages", messages: [], more: false };
  const one = { offset: 1, processor: "b", number: 1, ...JSON.parse(`{${encoded}}`) };
  const decoded = decodeMessage(JSON.stringify({ ...told, messages: [one] }));
  assert.deepEqual(decoded.messages[0].bytes, all);
  assert.equal(contentOf(all.buffer.slice(1, 3), 2), '"bytes":"AQI="');
  assert.equal(contentOf(new DataView(all.buffer, 1, 2), 2), '"bytes":"AQI="');
  assert.equal(contentOf("ä", 4), '"payload":"ä"');
  assert.equal(contentOf(null, 4), '"payload":null');
  for (const [value, bytesMax] of [["ä", 3], ["€", 4], [new Uint8Array(3), 2], ["xx", 3]]) {
    assert.throws(() => contentOf(value, bytesMax), PayloadTooLargeError);
  }
  for (const value of [undefined, () => {}, Symbol("x"), 1n]) {
    assert.throws(() => contentOf(value, 100), TypeError);
  }
});

test("a string with half of a surrogate pair is refused before it is sent", () => {
  const half = "\u{1f30a}".slice(0, 1);
  for (const value of [half, `x${half}y`, "\udc00\ud83c", `\\${half}`, [{ [half]: 1 }]]) {
    assert.throws(() => contentOf(value, 100), TypeError, JSON.stringify(value));
  }
  for (const value of ["\u{1f30a}", "\\ud83c", "\\\\ud83c", { "\u{1f30a}": "\ue000" }]) {
    assert.deepEqual(JSON.parse(`{${contentOf(value, 100)}}`).payload, value);
  }
});

test("whatever is lost and refused, each message is stored once and in order", () => {
  for (let seed = 1; seed <= 200; seed += 1) simulate(random(seed), seed);
});

/** A server that stores, refuses and forgets answers as it likes, and a session. */
function simulate(dice, seed) {
  const { session, reconnect, hear } = member({ windowMax: 1 + dice.below(6), retryMs: 10 });
  const stored = [];
  let made = 0;
  let number = 0;
  let now = 0;
  let answers = [];
  const settled = new Map();
  const taken = [];
  const note = (events) => {
    for (const { kind, asked } of events) {
      assert.notEqual(kind, "broken");
      if (kind === "answered" || kind === "refused") {
        assert.ok(!settled.has(asked));
        settled.set(asked, kind);
      }
    }
  };
  const take = (message) => {
    if (message.number <= number) return sent(message.number);
    if (message.number > number + 1) {
      return refusal("send", "gap", { number: message.number, retry: true });
    }
    if (message.payload.bad) return refusal("send", "cannot-fold", { number: message.number });
    if (dice.below(10) === 0) {
      return refusal("send", "unavailable", { number: message.number, retry: true });
    }
    number = message.number;
    stored.push(message.payload.n);
    return sent(message.number);
  };
  const serve = (count) => {
    for (let left = count, text; left > 0 && (text = session.publishToSend(now)); left -= 1) {
      answers.push(take(JSON.parse(text)));
    }
  };
  note(reconnect({}, now));
  for (let step = 0; step < 300; step += 1) {
    now += dice.below(5);
    const turn = dice.below(10);
    if (turn < 3 && made < 100) {
      const bad = dice.below(8) === 0;
      taken.push({ asked: session.send(content({ n: made, bad })), n: made, bad });
      made += 1;
    } else if (turn < 5) {
      serve(1 + dice.below(3));
    } else if (turn < 9) {
      // Refusals of what cannot be read may come before answers that wait for the disk.
      if (answers.length > 0) note(hear(answers.splice(dice.below(answers.length), 1)[0], now));
      note(session.tick(now));
    } else {
      answers = [];
      session.disconnected();
      note(reconnect({ number }, now));
    }
  }
  for (let round = 0; session.unacknowledged > 0; round += 1) {
    assert.ok(round < 1000, "it comes to an end");
    now += 20;
    note(session.tick(now));
    serve(Infinity);
    for (const one of answers.splice(0)) note(hear(one, now));
  }
  const good = taken.filter(({ bad }) => !bad);
  const expected = good.map(({ n }) => n);
  assert.deepEqual(stored, expected, `seed ${seed}`);
  for (const { asked, bad } of taken) {
    assert.equal(settled.get(asked), bad ? "refused" : "answered", `seed ${seed}`);
  }
}

/** A session of "a" in "c", joined unless told otherwise. */
function member({ joined: fields, ...options } = {}) {
  const session = new ChannelSession({ channel: "c", processor: "a", ...options });
  const hear = (message, now = 0) => session.receive(JSON.stringify(message), now);
  const said = (now = 0) => {
    const all = session.controlToSend();
    for (let one; (one = session.publishToSend(now));) all.push(one);
    return all.map((text) => JSON.parse(text));
  };
  const reconnect = (told = {}, now = 0) => {
    session.connecting();
    session.opened(now);
    session.controlToSend(); // HELLO and JOIN
    return hear(joined(told), now);
  };
  const pass = (now) => session.tick(now);
  if (fields !== undefined) reconnect(fields);
  return { session, hear, said, reconnect, pass };
}

function content(value) {
  return contentOf(value, 1000);
}

function joined(fields = {}) {
  const nothing = { epoch: 0, start: 0, end: 0, cursor: 0, number: 0 };
  return { type: "joined", channel: "c", ...nothing, ...fields };
}

function sent(number, offset) {
  return { type: "sent", channel: "c", number, offset };
}

function left(reason) {
  return { type: "left", channel: "c", reason };
}

function signal() {
  return { type: "signal", channel: "c", name: "pending" };
}

function messages(...at) {
  const all = at.map((offset, n) => {
    return { offset, processor: "b", number: n + 1, ms: 0, payload: offset };
  });
  return { type: "messages", channel: "c", count: all.length, messages: all, more: false };
}

function refusal(of, code, { number, retry = false } = {}) {
  return { type: "error", code, retry, text: "why", of, channel: "c", number };
}

function answer(asked, value) {
  return { kind: "answered", asked, answer: value };
}

function offsets(events) {
  for (const { kind } of events) assert.equal(kind, "message");
  return events.map(({ offset }) => offset);
}

function sends(said) {
  return said.map(({ type, number, payload }) => {
    assert.equal(type, "send");
    return `${number} ${payload}`;
  });
}

test("each connection says whose and which one it is", () => {
  const { session, said } = member({ instance: "i" });
  for (const attempt of [1, 2]) {
    session.connecting();
    session.opened(0);
    const hello = said()[0];
    assert.deepEqual([hello.instance, hello.attempt], ["i", attempt]);
    session.disconnected();
  }
});

test("from a state: the first join asks for it, every other for what lies behind the last message", () => {
  const { session, said, hear } = member({ from: "state", leaseMs: 60_000 });
  const join = (from) => {
    session.connecting();
    session.opened(0);
    const asked = { type: "join", channel: "c", receive: "push", from, lease_s: 60 };
    assert.deepEqual(said().slice(1), [asked]);
  };
  join("state");
  const state = { offset: 40, epoch: 1, payload: null };
  const [restored] = hear(joined({ end: 40, cursor: 40, snapshot: state }));
  assert.deepEqual([restored.kind, restored.offset], ["restore", 40]);
  assert.deepEqual(offsets(hear(messages(60, 80))), [60, 80]);
  session.disconnected();
  join(80);
  assert.deepEqual(hear(joined({ end: 100, cursor: 80 })), []);
  assert.deepEqual(offsets(hear(messages(100))), [100]);
});

test("from a state: what was done before a reconnect is acknowledged behind it", () => {
  const { session, said, hear, reconnect } = member({ from: "state" });
  reconnect({ end: 40, cursor: 40, snapshot: { offset: 40, epoch: 1, payload: 1 } });
  hear(messages(60, 80));
  session.disconnected();
  session.handled(60);
  reconnect({ end: 80, cursor: 80 });
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 60 }]);
  hear({ type: "acked", channel: "c", offset: 60 });
  session.handled(80);
  assert.deepEqual(said(), [{ type: "ack", channel: "c", offset: 80 }]);
});

test("a page that goes is forgotten, unless a message of it is under way", () => {
  const { session, said, hear, reconnect } = member({ joined: {} });
  session.hide();
  assert.deepEqual(said(), [{ type: "leave", channel: "c", forget: true }]);
  session.disconnected();
  reconnect();
  session.send(content("x"));
  said();
  session.hide();
  assert.deepEqual(said(), [{ type: "leave", channel: "c" }]);
  session.disconnected();
  assert.equal(reconnect({ number: 1 }).length, 1, "accepted before it left");
  session.leave();
  said();
  assert.deepEqual(hear(left()), [{ kind: "left" }]);
});
