// The client over real WebSockets, against a peer that does what a test tells it to.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:net";
import test from "node:test";
import { promisify } from "node:util";

import {
  BadTopicNameError,
  ClientClosedError,
  ConfigError,
  ConnectTimeoutError,
  HeadraceError,
  LocalProtocolError,
  PayloadTooLargeError,
  PublishRefusedError,
  UnacknowledgedError,
  connect,
  encode,
} from "../headrace.js";
import { listen, within } from "./peer.js";

// A port where nobody listens: no program is given it, and the standard lets a WebSocket dial it, unlike 1.
const NOBODY = 2;
const PATIENT = { pingIntervalMs: 60_000, resendMs: 60_000 };

test("a publish is done when it is acknowledged", async (t) => {
  const { client, connection } = await connected(t);
  const first = client.publish("t", "one");
  const second = client.publish("t", new Uint8Array([1, 2]));
  const third = client.publish("t", new Uint8Array([0, 3, 4, 0]).buffer.slice(1, 3));
  assert.deepEqual(await payloads(connection, 3), ["one", "\x01\x02", "\x03\x04"]);
  assert.equal(client.unacknowledged, 3);
  connection.send("ack", { topic: "t", sequence_number: 1 });
  await within(Promise.all([first, second]), "two acknowledgements");
  assert.equal(client.unacknowledged, 1);
  assert.equal(await Promise.race([third, "not yet"]), "not yet");
  const flushed = client.flush();
  connection.send("ack", { topic: "t", sequence_number: 2 });
  await within(Promise.all([third, flushed]), "the last acknowledgement");
});

test("a payload may be changed by its owner as soon as it is published", async (t) => {
  const peer = await listen(t);
  const client = open(t, peer);
  const payload = new Uint8Array([65]);
  client.publish("t", payload);
  payload[0] = 66;
  assert.deepEqual(await payloads(await peer.accept(), 1), ["A"]);
});

test("what cannot be published is rejected with a reason", async (t) => {
  const { client } = await connected(t);
  await assert.rejects(client.publish("", "x"), BadTopicNameError);
  await assert.rejects(client.publish("t", new Uint8Array(262_145)), PayloadTooLargeError);
  await assert.rejects(client.publish("t", 7), /a payload is bytes or text, not number/);
  await assert.rejects(client.publish(7, "x"), /a topic is a string, not number/);
  assert.equal(client.unacknowledged, 0);
});

test("a publish that only the server refuses fails alone, and the rest goes on", async (t) => {
  const peer = await listen(t);
  const client = open(t, peer);
  const stored = [];
  const refuse = async () => {
    while (!stored.includes("c")) {
      const connection = await peer.accept();
      for (let closed = false; !closed && !stored.includes("c");) {
        const { message, sequence_number: number } = await connection.expect("publish");
        const payload = Buffer.from(message).toString();
        closed = payload === "refused";
        if (closed) connection.close("1009 too much for me");
        else {
          connection.send("ack", { topic: "t", sequence_number: number });
          stored.push(payload);
        }
      }
    }
  };
  const refusing = refuse();
  const all = ["a", "refused", "b"].map((payload) => client.publish("t", payload));
  const refused = (error) =>
    error instanceof PublishRefusedError && /1009 too much for me/.test(error.reason);
  await within(assert.rejects(client.flush(), refused), "a refusal");
  await assert.rejects(all[1], refused);
  await within(Promise.all([all[0], all[2]]), "the others");
  await within(client.publish("t", "c"), "a later one");
  await client.flush();
  await refusing;
  assert.deepEqual(stored, ["a", "b", "c"]);
});

test("publishes beyond the window wait for room", async (t) => {
  const { client, connection } = await connected(t, { windowMax: 2 });
  const all = Promise.all(["a", "b", "c"].map((payload) => client.publish("t", payload)));
  assert.deepEqual(await payloads(connection, 2), ["a", "b"]);
  const room = client.window();
  connection.send("ack", { topic: "t", sequence_number: 0 });
  assert.deepEqual(await payloads(connection, 1), ["c"]);
  assert.equal(await Promise.race([room, "no room"]), "no room");
  connection.send("ack", { topic: "t", sequence_number: 2 });
  await within(Promise.all([all, room]), "acknowledgements and room");
});

test("a publish that is not acknowledged is sent again with its number", async (t) => {
  const { client, connection } = await connected(t, { resendMs: 20 });
  const published = client.publish("t", "x");
  assert.equal((await connection.expect("publish")).sequence_number, 0);
  assert.equal((await connection.expect("publish")).sequence_number, 0);
  connection.send("ack", { topic: "t", sequence_number: 0 });
  await within(published, "the acknowledgement");
});

test("messages come through the iterator, with serial, offsets and text", async (t) => {
  const { client, connection } = await connected(t);
  const subscription = client.subscribe("t", { serial: "17@0" });
  assert.equal(subscription.serial, "17@0");
  assert.equal(await connection.attach("t"), "17@0");
  assert.equal(await within(subscription.attached(), "ATTACHED"), "17@0");
  deliver(connection, "t", { "17@7": "foo", "17@15": "bär", opaque: "" });
  const messages = await take(subscription, 3);
  assert.deepEqual(serials(messages), ["17@7", "17@15", "opaque"]);
  assert.deepEqual(texts(messages), ["foo", "bär", ""]);
  assert.deepEqual(
    messages.map(({ epoch, offset, nextOffset }) => [epoch, offset, nextOffset]),
    [
      [17, 0, 7],
      [17, 7, 15],
      [null, null, null],
    ],
  );
  assert.equal(messages[0].topic, "t");
  assert.deepEqual(messages[0].payload, new Uint8Array(Buffer.from("foo")));
  assert.equal(subscription.serial, "opaque");
});

test("a loop that was left can be taken up again", async (t) => {
  const { client, connection } = await connected(t);
  const subscription = client.subscribe("t");
  await connection.attach("t", "1@0");
  deliver(connection, "t", { "1@1": "a", "1@2": "b" });
  for (const expected of ["a", "b"]) {
    for await (const message of subscription) {
      assert.equal(message.text(), expected);
      break;
    }
  }
});

test("messages come to a handler, one call after the other", async (t) => {
  const { client, connection } = await connected(t);
  const calls = [];
  const done = new Promise((resolve) => {
    client.subscribe("t", async (message) => {
      calls.push(`begin ${message.text()}`);
      await new Promise(setImmediate);
      calls.push(`end ${message.text()}`);
      if (message.text() === "b") resolve();
    });
  });
  await connection.attach("t", "1@0");
  deliver(connection, "t", { "1@1": "a", "1@2": "b" });
  await within(done, "two calls");
  assert.deepEqual(calls, ["begin a", "end a", "begin b", "end b"]);
});

test("what a handler throws is reported and breaks nothing", async (t) => {
  const reported = t.mock.method(console, "error", () => {});
  const { client, connection } = await connected(t);
  client.on("missed", () => {
    throw new Error("in missed");
  });
  const { promise, resolve } = withResolvers();
  const handler = (message) => {
    if (message.text() === "last") resolve();
    else throw new Error(`in ${message.text()}`);
  };
  const subscription = client.subscribe("t", handler, { serial: "1@0" });
  await connection.attach("t", "1@5");
  deliver(connection, "t", { "1@6": "a", "1@7": "b", "1@8": "last" });
  await within(promise, "the last message");
  const errors = reported.mock.calls.map((call) => call.arguments[0].message);
  assert.deepEqual(errors, ["in missed", "in a", "in b"]);
  assert.equal(client.state, "connected");
  assert.throws(() => client.on("other", () => {}), /no event "other"/);
  await assert.rejects(subscription.next(), LocalProtocolError);
});

test("a subscription starts where it is asked to", async (t) => {
  const { client, connection } = await connected(t);
  const starts = [
    [undefined, undefined],
    [{ from: "now" }, undefined],
    [{ serial: null }, undefined],
    [{ from: "start" }, "@0"],
    [{ offset: 7 }, "@7"],
    [{ offset: 2n ** 63n }, "@9223372036854775808"],
    [{ serial: "x" }, "x"],
    [{ serial: undefined, offset: 7, from: undefined }, "@7"],
  ];
  for (const [index, [options, serial]] of starts.entries()) {
    client.subscribe(`t${index}`, options);
    assert.equal((await connection.expect("attach")).serial, serial);
  }
  client.subscribe("no handler", undefined, { offset: 7 });
  assert.equal((await connection.expect("attach")).serial, "@7");
  for (const options of [
    ...[{ from: "end" }, { offset: 1.5 }, { offset: "7" }, { serial: 7 }, { start: 0 }],
    ...[{ from: "now", offset: 0 }],
  ]) {
    assert.throws(() => client.subscribe("t", options), TypeError);
  }
  assert.throws(() => client.subscribe("t", { offset: -1 }), RangeError);
  assert.throws(() => client.subscribe(""), BadTopicNameError);
  client.subscribe("t");
  assert.throws(() => client.subscribe("t"), LocalProtocolError);
});

test("missed is told before a message behind the gap can be taken", async (t) => {
  const { client, connection } = await connected(t);
  const told = [];
  const remove = client.on("missed", (missed) => told.push(missed));
  const subscription = client.subscribe("t", { offset: 3 });
  await connection.attach("t", "1@8");
  deliver(connection, "t", { "1@9": "a" });
  await take(subscription, 1);
  assert.deepEqual(told, [{ topic: "t", asked: "@3", got: "1@8" }]);
  remove();
  client.subscribe("u", { offset: 3 });
  await connection.attach("u", "1@8");
  await client.flush();
  assert.equal(told.length, 1);
});

test("a broken connection is made again, with its topics and unacknowledged publishes", async (t) => {
  const { peer, client, connection } = await connected(t);
  const states = [];
  client.on("state", (state) => states.push(state));
  const subscription = client.subscribe("t", { serial: "1@0" });
  await connection.attach("t");
  deliver(connection, "t", { "1@1": "a" });
  const acknowledged = client.publish("t", "x");
  client.publish("u", "y");
  client.publish("t", "z");
  await payloads(connection, 3);
  connection.send("ack", { topic: "t", sequence_number: 0 });
  await within(acknowledged, "an acknowledgement");
  connection.destroy();

  const second = await peer.accept();
  assert.equal(await second.attach("t"), "1@1");
  assert.deepEqual(await payloads(second, 2), ["y", "z"]);
  deliver(second, "t", { "1@2": "b" });
  second.send("ack", { topic: "t", sequence_number: 2 });
  await within(client.flush(), "acknowledgements");
  assert.deepEqual(texts(await take(subscription, 2)), ["a", "b"]);
  assert.deepEqual(states, ["disconnected", "connecting", "connected"]);
  assert.equal(client.lastError, "");
});

test("a server that does not answer pings is left", async (t) => {
  const peer = await listen(t);
  const client = open(t, peer, { pingIntervalMs: 20 });
  const first = await peer.accept();
  await within(client.connected(), "a connection");
  assert.ok(client.latencyMs >= 0);
  peer.pongs = false;
  const reason = nextState(client, "disconnected").then(() => client.lastError);
  assert.equal(await within(reason, "the end"), "a ping was not answered within 20 ms");
  await first.closed();
  peer.pongs = true;
  await peer.accept();
  await within(client.connected(), "a new connection");
});

test("a server that sends garbage is left", async (t) => {
  for (const garbage of [Uint8Array.of(0xc1), "text"]) {
    const { peer, client, connection } = await connected(t);
    const reason = nextState(client, "disconnected").then(() => client.lastError);
    connection.sendRaw(garbage);
    assert.match(await within(reason, "the end"), /^the server broke the protocol: /);
    await connection.closed();
    await peer.accept();
  }
});

test("why a server hung up is known", async (t) => {
  const reasons = {
    "1008 too many topics": "the server closed the connection: 1008 too many topics",
    "1001 ": "the server closed the connection: 1001",
    "": "the server closed the connection",
  };
  for (const [close, expected] of Object.entries(reasons)) {
    const { client, connection } = await connected(t);
    const reason = nextState(client, "disconnected").then(() => client.lastError);
    connection.close(close);
    assert.equal(await within(reason, "the end"), expected);
  }
});

test("waiting for a server that is not there ends with a reason", async (t) => {
  const client = open(t, { url: `ws://127.0.0.1:${NOBODY}` });
  await assert.rejects(client.connected({ timeoutMs: 100 }), (error) => {
    assert.ok(error instanceof ConnectTimeoutError);
    assert.match(error.message, /^no connection to ws:.*\/v1\/ws within 100 ms: ./);
    return true;
  });
  assert.notEqual(client.state, "connected");
});

test("an attempt that is refused has failed at once", async (t) => {
  const url = `ws://127.0.0.1:${NOBODY}`;
  const client = open(t, { url }, { attemptTimeoutMs: 60_000 });
  await within(nextState(client, "disconnected"), "the first failure");
  assert.notEqual(client.lastError, "");
  await within(nextState(client, "disconnected"), "the second failure");
});

test("an attempt that is never answered is given up", async (t) => {
  const peer = await listen(t, { upgrades: false });
  const client = open(t, peer, { attemptTimeoutMs: 20 });
  await within(nextState(client, "disconnected"), "the end of the attempt");
  assert.equal(client.lastError, "no answer within 20 ms");
});

test("a slow subscription leaves its topic and comes back where it stopped", async (t) => {
  const { client, connection } = await connected(t, { receiveBytesMax: 1000 });
  const subscription = client.subscribe("t", { serial: "1@0" });
  await connection.attach("t");
  const payload = "x".repeat(200);
  const six = [1, 2, 3, 4, 5, 6].map((n) => [`1@${n}`, payload]);
  deliver(connection, "t", Object.fromEntries(six));
  await connection.expect("detach");
  const published = client.publish("u", "x");
  await connection.expect("publish");
  connection.send("detached", { topic: "t" });
  connection.send("ack", { topic: "u", sequence_number: 0 });
  await within(published, "an acknowledgement, and DETACHED before it");
  assert.deepEqual(serials(await take(subscription, 1)), ["1@1"]);
  client.publish("u", "more than half is still to be taken");
  await connection.expect("publish");
  assert.deepEqual(serials(await take(subscription, 2)), ["1@2", "1@3"]);
  assert.equal(await connection.attach("t"), "1@4", "the fifth and the sixth came too late");
  deliver(connection, "t", { "1@5": payload, "1@6": payload });
  assert.deepEqual(serials(await take(subscription, 3)), ["1@4", "1@5", "1@6"]);
});

test("a slow handler is a slow subscription", async (t) => {
  const { client, connection } = await connected(t, { receiveBytesMax: 1 });
  const gate = withResolvers();
  const handled = [];
  client.subscribe("t", async (message) => {
    handled.push(message.serial);
    await gate.promise;
  });
  await connection.attach("t", "1@0");
  deliver(connection, "t", { "1@1": "a", "1@2": "b", "1@3": "c" });
  await connection.expect("detach");
  assert.deepEqual(handled, ["1@1"]);
  gate.resolve();
  connection.send("detached", { topic: "t" });
  assert.equal(await connection.attach("t"), "1@2");
  assert.deepEqual(handled, ["1@1", "1@2"]);
});

test("unsubscribing ends the iteration and waits for the server", async (t) => {
  const { client, connection } = await connected(t);
  const subscription = client.subscribe("t");
  await connection.attach("t", "1@0");
  const next = subscription.next();
  const unsubscribed = subscription.unsubscribe();
  assert.deepEqual(await within(next, "the end"), { value: undefined, done: true });
  await connection.expect("detach");
  assert.equal(await Promise.race([unsubscribed, "not yet"]), "not yet");
  connection.send("detached", { topic: "t" });
  await within(unsubscribed, "DETACHED");
  await subscription.unsubscribe();
  client.subscribe("t", { serial: "1@0" });
  assert.equal(await connection.attach("t"), "1@0");
});

test("unsubscribing does not wait for a server that is gone", async (t) => {
  const { client, connection } = await connected(t);
  const subscription = client.subscribe("t");
  await connection.expect("attach");
  const unsubscribed = subscription.unsubscribe();
  await connection.expect("detach");
  connection.destroy();
  await within(unsubscribed, "the end");
  await assert.rejects(subscription.attached(), /ended before it began/);
});

test("a subscription can be replaced before the server has answered", async (t) => {
  const { client, connection } = await connected(t);
  const first = client.subscribe("t");
  const ended = first.unsubscribe();
  const second = client.subscribe("t", { serial: "1@4" });
  await within(ended, "the end of the first");
  await connection.attach("t", "1@9");
  await connection.expect("detach");
  connection.send("detached", { topic: "t" });
  assert.equal(await connection.attach("t"), "1@4");
  assert.equal(await within(second.attached(), "ATTACHED"), "1@4");
  await first.unsubscribe();
  assert.equal(connection.waiting, 0, "the second is not touched");
});

test("a handler may unsubscribe, and hears of nothing after that", async (t) => {
  const { client, connection } = await connected(t);
  const heard = [];
  const subscription = client.subscribe("t", (message) => {
    heard.push(message.text());
    subscription.unsubscribe();
  });
  await connection.attach("t", "1@0");
  deliver(connection, "t", { "1@1": "a", "1@2": "b" });
  await connection.expect("detach");
  connection.send("detached", { topic: "t" });
  await client.flush();
  assert.deepEqual(heard, ["a"]);
});

test("closing waits for acknowledgements", async (t) => {
  const { client, connection } = await connected(t);
  const published = client.publish("t", "x");
  const closed = client.close();
  await connection.expect("publish");
  connection.send("ack", { topic: "t", sequence_number: 0 });
  await within(Promise.all([published, closed]), "the end");
  await connection.closed();
  assert.equal(client.state, "closed");
  await client.close();
});

test("closing without an acknowledgement says so, and ends all that waits", async (t) => {
  const { client, connection } = await connected(t, { windowMax: 1 });
  const states = [];
  client.on("state", (state) => states.push(state));
  const subscription = client.subscribe("t");
  const waiting = [
    client.publish("t", "x"),
    client.flush(),
    client.window(),
    subscription.attached(),
  ].map((promise) => assert.rejects(promise, ClientClosedError));
  const next = subscription.next();
  await assert.rejects(client.close({ flushMs: 10 }), (error) => {
    assert.ok(error instanceof UnacknowledgedError && error instanceof HeadraceError);
    assert.equal(error.publishes, 1);
    return true;
  });
  await within(Promise.all(waiting), "rejections");
  assert.deepEqual(await next, { value: undefined, done: true });
  assert.deepEqual(states, ["closed"]);
  await connection.closed();
  await assert.rejects(client.publish("t", "x"), ClientClosedError);
  await assert.rejects(client.connected(), ClientClosedError);
  await assert.rejects(client.flush(), ClientClosedError);
  assert.throws(() => client.subscribe("u"), ClientClosedError);
  await subscription.unsubscribe();
});

test("closing with flushMs 0 waits for nothing and says nothing", async (t) => {
  const { client, connection } = await connected(t);
  client.publish("t", "x");
  await within(client.close({ flushMs: 0 }), "the end");
  await connection.closed();
});

test("a client that is closed while its server is away stays closed", async (t) => {
  const { client, connection, peer } = await connected(t);
  const closed = new Promise((resolve) => {
    client.on("state", (state) => {
      if (state === "disconnected") resolve(client.close());
    });
  });
  connection.destroy();
  await within(closed, "the end");
  assert.equal(client.state, "closed");
  const other = open(t, peer);
  await peer.accept();
  await within(other.connected(), "a connection that is not the closed client's");
});

test("a closed client lets the process end, whatever its server does", async (t) => {
  const silent = createServer((socket) => socket.on("error", () => {}));
  silent.listen(0, "127.0.0.1");
  await once(silent, "listening");
  t.after(() => silent.close());
  const peer = await listen(t, { pongs: false });
  for (const port of [peer.port, silent.address().port, NOBODY]) {
    const script = `
      import { connect } from ${JSON.stringify(new URL("../headrace.js", import.meta.url).href)};
      const client = connect("ws://127.0.0.1:${port}", { attemptTimeoutMs: 60_000 });
      client.publish("t", "x");
      client.subscribe("t", () => {});
      await client.connected({ timeoutMs: 20 }).catch(() => {});
      await client.close({ flushMs: 20 }).catch((error) => console.log(error.name));
    `;
    const args = ["--experimental-websocket", "--input-type=module", "--eval", script];
    const { stdout } = await promisify(execFile)(process.execPath, args, { timeout: 60_000 });
    assert.equal(stdout, "UnacknowledgedError\n");
  }
});

test("what a WebSocket is given to hold is bounded", async (t) => {
  let held = 0;
  class Watched extends WebSocket {
    send(data) {
      super.send(data);
      held = Math.max(held, this.bufferedAmount);
    }
  }
  const { client, connection } = await connected(t, {
    ...{ WebSocket: Watched, windowBytesMax: 1024 ** 3, ...PATIENT },
  });
  connection.pause();
  const payload = new Uint8Array(100_000);
  const count = 100;
  const all = Array.from({ length: count }, () => client.publish("t", payload));
  assert.ok(held > 100_000 && held < 500_000, String(held));
  connection.resume();
  for (let n = 0; n < count; n += 1) await connection.expect("publish");
  connection.send("ack", { topic: "t", sequence_number: count - 1 });
  await within(Promise.all(all), "acknowledgements");
  assert.ok(held < 500_000, String(held));
});

test("a handler hears of nothing after it was unsubscribed", async (t) => {
  const { client, socket } = openFake(t);
  const heard = [];
  const subscription = client.subscribe("t", (message) => heard.push(message.text()));
  client.subscribe("u", { offset: 3 });
  client.on("missed", () => subscription.unsubscribe());
  socket.open();
  socket.bring("attached", { topic: "t", serial: "1@0" });
  socket.bring("payload", { topic: "t", serial: "1@5", message: new Uint8Array(1) });
  socket.bring("attached", { topic: "u", serial: "1@5" }); // before the handler could be called
  socket.bring("detached", { topic: "t" });
  await client.close();
  assert.deepEqual(heard, []);
});

test("a client may be closed by any handler", async (t) => {
  for (const closing of ["connecting", "connected", "disconnected"]) {
    const { client, socket, made } = openFake(t);
    client.subscribe("t");
    const closed = new Promise((resolve) => {
      client.on("state", (state) => {
        if (state === closing) resolve(client.close());
      });
    });
    socket.open();
    socket.bring("attached", { topic: "t", serial: "1@0" });
    if (client.state !== "closed") socket.close();
    await within(closed, "the end");
    assert.equal(client.state, "closed");
    assert.equal(made.length, 1, closing);
  }
});

test("an attempt that has succeeded is not given up later", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { client, socket, made } = openFake(t);
  socket.open();
  socket.bring("pong", { timestamp: 0 });
  t.mock.timers.tick(5000);
  assert.equal(client.state, "connected");
  assert.equal(made.length, 1);
});

test("a WebSocket that cannot be made is an attempt that failed", async (t) => {
  class Refused {
    constructor() {
      throw new Error("insecure");
    }
  }
  const client = open(t, { url: "ws://127.0.0.1:1" }, { WebSocket: Refused });
  assert.equal(client.state, "disconnected");
  await assert.rejects(client.connected({ timeoutMs: 1 }), /within 1 ms: insecure/);
});

test("a URL names the server, and the path when it is not the usual one", async (t) => {
  const urls = [
    ["ws://127.0.0.1:1", "ws://127.0.0.1:1/v1/ws"],
    ["ws://127.0.0.1", "ws://127.0.0.1/v1/ws"],
    ["wss://example.test/", "wss://example.test/v1/ws"],
    ["wss://example.test/log/ws?key=1", "wss://example.test/log/ws?key=1"],
    ["wombat://[::1]", "ws://[::1]:8120/v1/ws"],
    ["wombat://localhost:80", "ws://localhost/v1/ws"],
    ["wombats://example.test", "wss://example.test/v1/ws"],
    ["wombats://example.test:8443/#top", "wss://example.test:8443/v1/ws"],
  ];
  for (const [url, expected] of urls) assert.equal(openFake(t, url).socket.url, expected);
  for (const url of ["", "127.0.0.1:1", "http://a", "figg://a", "ws://", "ws://a:x", undefined]) {
    assert.throws(() => connect(url), ConfigError);
  }
});

test("an option that cannot be meant is refused", () => {
  for (const options of [
    ...[{ windowMax: 0 }, { windowMax: "1" }, { pingIntervalMs: NaN }, { resendMs: Infinity }],
    ...[{ jitter: 2 }, { jitter: -1 }, { flushTimeoutMs: -1 }, { receiveBytesMax: null }],
  ]) {
    assert.throws(() => connect("ws://127.0.0.1:1", options), ConfigError);
  }
  assert.throws(() => connect("ws://127.0.0.1:1", { windowMux: 1 }), /no option "windowMux"/);
  assert.throws(
    () => connect("ws://127.0.0.1:1", { WebSocket: null }),
    /there is no WebSocket here/,
  );
});

function open(t, peer, options = {}) {
  const client = connect(peer.url, options);
  t.after(() => client.close({ flushMs: 0 }));
  return client;
}

async function connected(t, options) {
  const peer = await listen(t);
  const client = open(t, peer, options);
  const connection = await peer.accept();
  await within(client.connected(), "a connection");
  return { peer, client, connection };
}

/** A client whose WebSocket does what it is told, at once. */
function openFake(t, url = "ws://127.0.0.1:1") {
  const made = [];
  class Fake extends EventTarget {
    bufferedAmount = 0;

    constructor(target) {
      super();
      this.url = target;
      made.push(this);
    }

    send() {}

    open() {
      this.dispatchEvent(new Event("open"));
    }

    bring(name, fields) {
      this.dispatchEvent(Object.assign(new Event("message"), { data: encode(name, fields) }));
    }

    close(code = 1005) {
      this.dispatchEvent(Object.assign(new Event("close"), { code, reason: "" }));
    }
  }
  const client = open(t, { url }, { WebSocket: Fake });
  return { client, made, socket: made[0] };
}

function nextState(client, wanted) {
  return new Promise((resolve) => {
    const remove = client.on("state", (state) => {
      if (state !== wanted) return;
      remove();
      resolve();
    });
  });
}

async function payloads(connection, count) {
  const messages = [];
  while (messages.length < count) messages.push((await connection.expect("publish")).message);
  return messages.map((message) => Buffer.from(message).toString());
}

function deliver(connection, topic, messages) {
  for (const [serial, text] of Object.entries(messages)) {
    connection.send("payload", { topic, serial, message: new Uint8Array(Buffer.from(text)) });
  }
}

async function take(subscription, count) {
  const messages = [];
  while (messages.length < count) {
    messages.push((await within(subscription.next(), "a message")).value);
  }
  return messages;
}

function serials(messages) {
  return messages.map((message) => message.serial);
}

function texts(messages) {
  return messages.map((message) => message.text());
}

function withResolvers() {
  let resolve;
  const promise = new Promise((resolver) => {
    resolve = resolver;
  });
  return { promise, resolve };
}
