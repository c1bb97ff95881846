// The session: messages and times go in, messages and events come out. No sockets, no waiting.

import assert from "node:assert/strict";
import test from "node:test";

import {
  BadTopicNameError,
  PayloadTooLargeError,
  WombatSession,
  decode,
  encode,
} from "../headrace.js";
import { random } from "./random.js";

test("a connection counts as connected when the server has answered, not when it is open", () => {
  const { session, say, sent } = client();
  session.connecting();
  assert.equal(session.state, "connecting");
  session.opened(1000);
  assert.deepEqual(sent(), [{ name: "ping", timestamp: 1_000_000 }]);
  assert.equal(session.state, "connecting");
  say("pong", { timestamp: 1_000_000 });
  assert.equal(session.state, "connected");
});

test("a ping is sent every interval, and its answer gives the latency", () => {
  const { session, say, sent } = client({ connected: 0 });
  assert.equal(session.latencyMs, 0);
  assert.equal(session.tickAt, 5000);
  assert.deepEqual(session.tick(4999), []);
  assert.deepEqual(sent(), []);
  assert.deepEqual(session.tick(5000), []);
  assert.deepEqual(sent(), [{ name: "ping", timestamp: 5_000_000 }]);
  say("pong", { timestamp: 1 }, 5001);
  assert.equal(session.latencyMs, 0, "the answer to another ping");
  say("pong", { timestamp: 5_000_000 }, 5012.5);
  assert.equal(session.latencyMs, 12.5);
  assert.deepEqual(session.tick(10_000), []);
});

test("without an answer by the next ping the connection is given up", () => {
  const { session } = client({ connected: 0 });
  assert.deepEqual(session.tick(5000), []);
  const reason = "a ping was not answered within 5000 ms";
  assert.deepEqual(session.tick(10_000), [{ kind: "broken", reason }]);
});

test("the wait before an attempt is 100 ms times 2 to the number of attempts, up to 10 s", () => {
  const { session, say } = client();
  const waits = () =>
    Array.from({ length: 9 }, () => (session.connecting(), session.disconnected()));
  const expected = [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000];
  assert.deepEqual(waits(), expected);
  session.connecting();
  session.opened(0);
  assert.equal(session.disconnected(), 10_000, "an open port is not a server");
  session.connecting();
  session.opened(0);
  say("pong", { timestamp: 0 });
  assert.deepEqual([session.disconnected(), ...waits()].slice(0, 9), expected);
});

test("jitter, when asked for, cuts off its share of the wait at random", () => {
  const { session } = client({ jitter: 0.5, random: () => 0.5 });
  assert.equal(session.disconnected(), 75);
});

test("publishes are numbered over all topics and connections", () => {
  const { publish, reconnect, sent } = client({ connected: 0 });
  publish("a", "1");
  publish("b", "2");
  assert.deepEqual(numbers(sent()), ["a 0", "b 1"]);
  reconnect();
  publish("a", "3");
  assert.deepEqual(numbers(sent()), ["a 0", "b 1", "a 2"]);
});

test("an acknowledgement counts for every publish at or below its number, on any topic", () => {
  const { session, publish, say, sent } = client({ connected: 0 });
  for (const topic of ["a", "b", "a", "b"]) publish(topic);
  sent();
  const ack = (number) => say("ack", { topic: "a", sequence_number: number });
  assert.deepEqual(ack(2), [{ kind: "acknowledged", publishes: 3 }]);
  assert.deepEqual(ack(2), [], "again");
  assert.deepEqual(ack(0), [], "older");
  assert.equal(session.unacknowledged, 1);
  assert.deepEqual(ack(3), [{ kind: "acknowledged", publishes: 1 }]);
  assert.equal(session.unacknowledged, 0);
});

test("an acknowledgement of what was never sent breaks the connection", () => {
  const { publish, say, sent } = client({ connected: 0 });
  publish("a");
  const early = say("ack", { topic: "a", sequence_number: 0 });
  assert.equal(early[0].kind, "broken", "taken, and not yet sent");
  sent();
  assert.equal(say("ack", { topic: "a", sequence_number: 1 })[0].kind, "broken");
  assert.equal(say("ack", { topic: "a", sequence_number: 0 })[0].kind, "acknowledged");
});

test("numbers wrap at 2^32", () => {
  const { session, publish, say, reconnect, sent } = client({
    connected: 0,
    firstNumber: 2 ** 32 - 2,
  });
  for (let n = 0; n < 4; n += 1) publish("a");
  assert.deepEqual(numbers(sent()), ["a 4294967294", "a 4294967295", "a 0", "a 1"]);
  assert.deepEqual(say("ack", { topic: "a", sequence_number: 2 ** 32 - 1 }), [
    { kind: "acknowledged", publishes: 2 },
  ]);
  assert.deepEqual(say("ack", { topic: "a", sequence_number: 2 ** 32 - 2 }), []);
  reconnect();
  assert.deepEqual(numbers(sent()), ["a 0", "a 1"]);
  assert.deepEqual(say("ack", { topic: "a", sequence_number: 1 }), [
    { kind: "acknowledged", publishes: 2 },
  ]);
  assert.equal(session.unacknowledged, 0);
});

test("what is unacknowledged for 2 s is sent again with its number, each publish in its time", () => {
  const { session, publish, say, sent } = client({ connected: 0, pingIntervalMs: 100_000 });
  publish("a");
  sent(1000);
  publish("b");
  sent(1500);
  assert.equal(session.tickAt, 3000);
  session.tick(2999);
  assert.deepEqual(sent(2999), []);
  session.tick(3000);
  assert.deepEqual(numbers(sent(3000)), ["a 0"]);
  assert.equal(session.tickAt, 3500);
  session.tick(3500);
  assert.deepEqual(numbers(sent(3500)), ["b 1"]);
  say("ack", { topic: "a", sequence_number: 0 }, 4000);
  session.tick(5500);
  assert.deepEqual(numbers(sent(5500)), ["b 1"]);
  say("ack", { topic: "b", sequence_number: 1 }, 6000);
  session.tick(7500);
  assert.deepEqual(sent(7500), []);
  assert.equal(session.tickAt, 100_000);
});

test("an acknowledgement that comes before the second sending prevents it", () => {
  const { session, publish, say, sent } = client({ connected: 0 });
  publish("a");
  publish("b");
  sent(0);
  session.tick(2000);
  say("ack", { topic: "a", sequence_number: 0 }, 2000);
  assert.deepEqual(numbers(sent(2000)), ["b 1"]);
});

test("what waits to be sent again is not put in line twice", () => {
  const { session, publish, sent } = client({ connected: 0, pingIntervalMs: 100_000 });
  publish("a");
  publish("b");
  sent(0);
  session.tick(2000);
  decode(session.publishToSend(2500)); // then there was no room for the second
  session.tick(4500);
  assert.deepEqual(numbers(sent(4500)), ["b 1", "a 0"]);
});

test("nothing is sent again while the connection has not taken what it was given", () => {
  const { session, publish, sent } = client({ connected: 0 });
  publish("a");
  sent(0);
  session.tick(2000, false);
  assert.deepEqual(sent(2000), []);
  session.tick(4000, true);
  assert.deepEqual(numbers(sent(4000)), ["a 0"]);
});

test("what is over the window waits for acknowledgements, in order", () => {
  const { session, publish, say, sent } = client({ connected: 0, windowMax: 2 });
  for (let n = 0; n < 5; n += 1) publish("a");
  assert.equal(session.unacknowledged, 5);
  assert.equal(session.hasRoom, false);
  assert.deepEqual(numbers(sent()), ["a 0", "a 1"]);
  say("ack", { topic: "a", sequence_number: 0 });
  assert.deepEqual(numbers(sent()), ["a 2"]);
  say("ack", { topic: "a", sequence_number: 2 });
  assert.deepEqual(numbers(sent()), ["a 3", "a 4"]);
  say("ack", { topic: "a", sequence_number: 3 });
  assert.equal(session.hasRoom, true);
});

test("the window is bounded in bytes too, and the last publish may go beyond", () => {
  const { session, publish, say, sent } = client({ connected: 0, windowBytesMax: 1000 });
  for (let n = 0; n < 3; n += 1) publish("a", "x".repeat(600));
  assert.deepEqual(numbers(sent()), ["a 0", "a 1"]);
  assert.equal(session.hasRoom, false);
  say("ack", { topic: "a", sequence_number: 1 });
  assert.equal(session.hasRoom, true);
  assert.deepEqual(numbers(sent()), ["a 2"]);
});

test("what is published without a connection is sent when there is one", () => {
  const { session, publish, sent } = client();
  publish("a");
  session.attach("t", "1@7");
  assert.deepEqual(sent(), []);
  session.connecting();
  session.opened(0);
  assert.deepEqual(
    sent().map((message) => message.name),
    ["ping", "attach", "publish"],
  );
});

test("bad names and too large payloads are refused and not sent", () => {
  const { session, publish, sent } = client({ connected: 0 });
  for (const topic of ["", "x".repeat(256), "é".repeat(128), "\ud800", "$logux/a", "$channel/a", "$x"]) {
    assert.throws(() => publish(topic), BadTopicNameError);
  }
  for (const topic of ["", "x".repeat(256), "\udc00a", "$channel/" + "x".repeat(248)]) {
    assert.throws(() => session.attach(topic, null), BadTopicNameError);
  }
  assert.throws(() => publish("a", "x".repeat(262_145)), PayloadTooLargeError);
  assert.throws(() => publish(7), TypeError);
  assert.deepEqual(sent(), []);
  assert.equal(session.unacknowledged, 0);
  publish("é".repeat(127) + "x", "x".repeat(262_144));
  publish("\u{1f30a}", "");
  publish("channel/a", "");
  session.attach("$logux/a", null);
  session.attach("$channel/" + "x".repeat(247), null);
  assert.deepEqual(
    sent().map((message) => message.name),
    ["attach", "attach", "publish", "publish", "publish"],
  );
});

test("a publish that the server closes on three times in a row is given up, and was sent alone before", () => {
  const { session, publish, reconnect, say, sent } = client({ connected: 0 });
  for (const topic of ["bad", "b", "c"]) publish(topic);
  assert.deepEqual(numbers(sent()), ["bad 0", "b 1", "c 2"]);
  assert.deepEqual(session.hungUp(1009, "1009 too big"), []);
  reconnect();
  say("pong", { timestamp: 0 });
  assert.deepEqual(numbers(sent()), ["bad 0", "b 1", "c 2"]);
  assert.deepEqual(session.hungUp(1009, "1009 too big"), []);
  reconnect();
  say("pong", { timestamp: 0 });
  assert.deepEqual(numbers(sent()), ["bad 0"]);
  const refused = { kind: "refused", reason: "1009 too big" };
  assert.deepEqual(session.hungUp(1009, "1009 too big"), [refused]);
  assert.equal(session.unacknowledged, 2);
  reconnect();
  assert.deepEqual(numbers(sent()), ["b 1", "c 2"]);
  say("ack", { topic: "c", sequence_number: 2 });
  assert.equal(session.unacknowledged, 0);
});

test("other ends of a connection, and acknowledgements, say that a publish is not refused", () => {
  const { session, publish, reconnect, say, sent } = client({ connected: 0 });
  publish("a");
  const again = (end) => {
    sent();
    const events = end();
    reconnect();
    say("pong", { timestamp: 0 });
    return events;
  };
  const hangUp = () => session.hungUp(1008, "");
  const others = [() => [], () => session.hungUp(1001, ""), () => session.hungUp(1006, "")];
  for (const other of others) {
    for (const end of [hangUp, hangUp, other]) assert.deepEqual(again(end), []);
  }
  again(hangUp);
  again(hangUp);
  publish("b");
  assert.deepEqual(numbers(sent()), ["a 0"], "alone");
  say("ack", { topic: "a", sequence_number: 0 });
  assert.deepEqual(numbers(sent()), ["b 1"]);
  for (const end of [hangUp, hangUp]) assert.deepEqual(again(end), []);
  session.disconnected();
  session.connecting();
  session.opened(0);
  assert.deepEqual(session.hungUp(1008, ""), [], "before the server has answered");
});

test("a topic is asked for from a serial or from its end", () => {
  const { session, sent } = client({ connected: 0 });
  session.attach("a", "1@7");
  session.attach("b", null);
  assert.deepEqual(sent(), [
    { name: "attach", topic: "a", serial: "1@7" },
    { name: "attach", topic: "b" },
  ]);
});

test("messages are delivered with their serials once the topic is attached", () => {
  const { session, say } = client({ connected: 0 });
  const payload = new Uint8Array([1]);
  assert.deepEqual(say("payload", { topic: "a", serial: "1@9", message: payload }), []);
  session.attach("a", null);
  assert.deepEqual(say("payload", { topic: "a", serial: "1@9", message: payload }), []);
  assert.deepEqual(say("attached", { topic: "a", serial: "1@9" }), [
    { kind: "attached", topic: "a", serial: "1@9" },
  ]);
  assert.deepEqual(say("payload", { topic: "a", serial: "1@14", message: payload }), [
    { kind: "message", topic: "a", serial: "1@14", payload },
  ]);
});

test("a serial other than the one asked for means that messages were missed", () => {
  const { session, say } = client({ connected: 0 });
  session.attach("a", "1@7");
  session.attach("b", "1@7");
  session.attach("c", null);
  const kinds = (topic, serial) => say("attached", { topic, serial }).map((event) => event.kind);
  assert.deepEqual(kinds("a", "1@7"), ["attached"]);
  assert.deepEqual(kinds("c", "1@7"), ["attached"]);
  assert.deepEqual(say("attached", { topic: "b", serial: "2@9" }), [
    { kind: "attached", topic: "b", serial: "2@9" },
    { kind: "missed", topic: "b", asked: "1@7", got: "2@9" },
  ]);
});

test("a new connection is asked for every topic from its last serial", () => {
  const { session, say, reconnect, sent } = client({ connected: 0 });
  const message = new Uint8Array();
  session.attach("received", "1@1");
  session.attach("attached", null);
  session.attach("asked", "1@1");
  session.attach("new", null);
  say("attached", { topic: "received", serial: "1@1" });
  say("payload", { topic: "received", serial: "1@5", message });
  say("attached", { topic: "attached", serial: "1@9" });
  reconnect();
  const attach = (topic, serial) => ({ name: "attach", topic, ...(serial && { serial }) });
  assert.deepEqual(sent().slice(1), [
    attach("received", "1@5"),
    attach("attached", "1@9"),
    attach("asked", "1@1"),
    attach("new"),
  ]);
  assert.deepEqual(say("payload", { topic: "received", serial: "1@9", message }), []);
  assert.equal(say("attached", { topic: "received", serial: "1@5" }).length, 1);
  assert.deepEqual(say("attached", { topic: "attached", serial: "1@20" })[1], {
    ...{ kind: "missed", topic: "attached", asked: "1@9", got: "1@20" },
  });
});

test("a detached topic delivers nothing, and is not asked for again", () => {
  const { session, say, reconnect, sent } = client({ connected: 0 });
  const message = new Uint8Array();
  session.attach("a", null);
  say("attached", { topic: "a", serial: "1@0" });
  sent();
  assert.equal(session.detach("a"), true);
  assert.deepEqual(sent(), [{ name: "detach", topic: "a" }]);
  assert.deepEqual(say("payload", { topic: "a", serial: "1@4", message }), []);
  assert.equal(session.detach("a"), true, "its answer is still to come");
  assert.deepEqual(sent(), []);
  assert.deepEqual(say("detached", { topic: "a" }), [{ kind: "detached", topic: "a" }]);
  assert.equal(session.detach("a"), false);
  session.attach("b", null);
  session.detach("b");
  reconnect();
  assert.deepEqual(
    sent().map((message) => message.name),
    ["ping"],
  );
});

test("a topic that is wanted again waits for the end of its first life", () => {
  const { session, say, reconnect, sent } = client({ connected: 0 });
  session.attach("a", null);
  session.detach("a");
  session.attach("a", "1@7");
  assert.deepEqual(
    sent().map((message) => message.name),
    ["attach", "detach"],
  );
  assert.deepEqual(say("attached", { topic: "a", serial: "1@0" }), [], "of the first life");
  assert.deepEqual(say("detached", { topic: "a" }), []);
  assert.deepEqual(sent(), [{ name: "attach", topic: "a", serial: "1@7" }]);
  assert.equal(say("attached", { topic: "a", serial: "1@7" }).length, 1);
  session.detach("a");
  session.attach("a", "1@9");
  sent();
  reconnect();
  assert.deepEqual(sent().slice(1), [{ name: "attach", topic: "a", serial: "1@9" }]);
});

test("a topic that is wanted again and then no more is detached once", () => {
  const { session, say, sent } = client({ connected: 0 });
  session.attach("a", null);
  session.detach("a");
  session.attach("a", "1@7");
  assert.equal(session.detach("a"), true);
  assert.deepEqual(
    sent().map((message) => message.name),
    ["attach", "detach"],
  );
  assert.deepEqual(say("detached", { topic: "a" }), [{ kind: "detached", topic: "a" }]);
  assert.deepEqual(sent(), []);
});

test("without a connection topics come and go unseen", () => {
  const { session, sent } = client();
  session.attach("a", null);
  session.attach("b", null);
  assert.equal(session.detach("a"), false);
  session.connecting();
  session.opened(0);
  assert.deepEqual(sent().slice(1), [{ name: "attach", topic: "b" }]);
});

test("a server that detaches unasked is not believed any more", () => {
  const { session, say } = client({ connected: 0 });
  assert.deepEqual(say("detached", { topic: "a" }), []);
  session.attach("a", null);
  assert.equal(say("detached", { topic: "a" })[0].kind, "broken");
});

test("garbage breaks the connection and is no sign of a server", () => {
  for (const data of [new Uint8Array([0xc1]), "text", new Uint8Array()]) {
    const { session } = client();
    session.connecting();
    session.opened(0);
    const [event] = session.receive(data, 0);
    assert.match(event.reason, /^the server broke the protocol: /);
    assert.equal(session.state, "connecting");
  }
});

test("messages of unknown types are ignored", () => {
  const { session } = client({ connected: 0 });
  const novel = Buffer.from("81a474797065cd0100", "hex");
  assert.deepEqual(session.receive(novel, 0), []);
  assert.equal(session.state, "connected");
});

test("control messages overtake publishes", () => {
  const { session, publish } = client({ connected: 0 });
  publish("a");
  session.attach("t", null);
  assert.deepEqual(
    session.controlToSend().map((data) => decode(data).name),
    ["attach"],
  );
  assert.equal(decode(session.publishToSend(0)).name, "publish");
  assert.equal(session.publishToSend(0), null);
});

test("over withheld acknowledgements and broken connections every publish arrives, in order", () => {
  for (let seed = 1; seed <= 50; seed += 1) {
    const { below } = random(seed);
    const { session, publish, say, reconnect, sent } = client({
      ...{ connected: 0, windowMax: 1 + below(20), firstNumber: 2 ** 32 - 1 - below(100) },
    });
    const log = [];
    const count = 100;
    let published = 0;
    let received = new Set(); // the numbers that came on this connection
    for (let now = 0; published < count || session.unacknowledged > 0; now += below(400)) {
      if (published < count && below(2)) publish("a", String(published++));
      if (below(20) === 0) {
        reconnect(now);
        received = new Set();
      }
      assert.deepEqual(session.tick(now), [], `seed ${seed}`);
      let last;
      for (const { name, timestamp, sequence_number: number, message } of sent(now)) {
        if (name === "ping") say("pong", { timestamp }, now);
        if (name !== "publish") continue;
        if (!received.has(number)) log.push(Number(Buffer.from(message)));
        received.add(number);
        last = number;
      }
      if (last !== undefined && below(3)) say("ack", { topic: "a", sequence_number: last }, now);
    }
    assert.deepEqual([...new Set(log)], [...Array(count).keys()], `seed ${seed}`);
  }
});

/** A session, and its server reduced to what it says and hears. */
function client({ connected, ...options } = {}) {
  const session = new WombatSession(options);
  const say = (name, fields, now = 0) => session.receive(encode(name, fields), now);
  const sent = (now = 0) => {
    const messages = session.controlToSend();
    for (let data; (data = session.publishToSend(now)) !== null;) messages.push(data);
    return messages.map((data) => decode(data));
  };
  const reconnect = (now = 0) => {
    session.disconnected();
    session.connecting();
    session.opened(now);
  };
  const publish = (topic, payload = "") => session.publish(topic, Buffer.from(payload));
  if (connected !== undefined) {
    session.connecting();
    session.opened(connected);
    const [ping] = sent(connected);
    say("pong", { timestamp: ping.timestamp }, connected);
  }
  return { session, say, sent, reconnect, publish };
}

function numbers(messages) {
  return messages
    .filter(({ name }) => name === "publish")
    .map(({ topic, sequence_number: number }) => `${topic} ${number}`);
}
