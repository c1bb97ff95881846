// A channel over real WebSockets, against a peer that does what a test tells it to.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import test from "node:test";
import { promisify } from "node:util";

import { ChannelError, joinChannel } from "../channel.js";
import { connectChannels } from "../channel_connection.js";
import {
  ClientClosedError,
  ConfigError,
  ConnectTimeoutError,
  LocalProtocolError,
  PayloadTooLargeError,
  UnacknowledgedError,
} from "../headrace.js";
import { listen, within } from "./peer.js";

const codec = {
  encode: (type, fields) => JSON.stringify({ type, channel: "c", ...fields }),
  decode(data) {
    const { type, ...fields } = JSON.parse(data);
    return { name: type, ...fields };
  },
};

test("what is sent is accepted by number, with its offset", async (t) => {
  const { channel, connection } = await joined(t);
  const first = channel.send({ insert: "x" });
  const second = channel.send(new Uint8Array([1, 2]));
  const { number, payload } = await connection.expect("send");
  assert.deepEqual([number, payload], [1, { insert: "x" }]);
  assert.equal((await connection.expect("send")).bytes, "AQI=");
  assert.equal(channel.unacknowledged, 2);
  connection.send("sent", { number: 1, offset: 22 });
  assert.equal(await within(first, "the answer"), 22);
  const flushed = channel.flush();
  connection.send("sent", { number: 2, offset: 44, duplicate: true });
  await within(flushed, "the flush");
  assert.equal(await second, 44);
});

test("what is sent without a connection goes out with the next one", async (t) => {
  const { peer, channel, connection } = await joined(t);
  connection.destroy();
  await state(channel, "disconnected");
  const sent = channel.send("later");
  const next = await rejoin(peer, { number: 4 });
  assert.equal((await next.expect("send")).number, 5);
  next.send("sent", { number: 5, offset: 9 });
  assert.equal(await within(sent, "the answer"), 9);
});

test("what the server refuses is rejected with its code, and the next goes on", async (t) => {
  const { channel, connection } = await joined(t);
  const bad = channel.send("bad");
  const good = channel.send("good");
  await connection.expect("send");
  await connection.expect("send");
  refuse(connection, "send", "cannot-fold", { number: 1 });
  refuse(connection, "send", "gap", { number: 2, retry: true });
  await assert.rejects(bad, (error) => {
    assert.ok(error instanceof ChannelError);
    assert.deepEqual([error.code, error.message], ["cannot-fold", "why"]);
    return true;
  });
  const again = await connection.expect("send");
  assert.deepEqual([again.number, again.payload], [1, "good"]);
  connection.send("sent", { number: 1, offset: 5 });
  await within(good, "the answer");
});

test("what cannot be sent is rejected with a reason, and costs no number", async (t) => {
  const { channel, connection } = await joined(t);
  await assert.rejects(channel.send(undefined), /undefined is neither JSON nor bytes/);
  await assert.rejects(channel.send("\u{1f30a}".slice(1)), /half of a surrogate pair/);
  await assert.rejects(channel.send(new Uint8Array(262_145)), PayloadTooLargeError);
  await assert.rejects(channel.upload(new Uint8Array(1_048_577), 0), PayloadTooLargeError);
  await assert.rejects(channel.upload(0, -1), TypeError);
  channel.send("x");
  assert.equal((await connection.expect("send")).number, 1);
});

test("a message of a loop is acknowledged when the next one is asked for", async (t) => {
  const { channel, connection } = await joined(t);
  bring(connection, { 10: "x", 20: "y" });
  const { value: x } = await within(channel.next(), "a message");
  const { nextOffset, processor, number, ms, payload, bytes } = x;
  assert.deepEqual([nextOffset, processor, number, ms, payload], [10, "b", 10, 7, "x"]);
  assert.equal(bytes, undefined);
  for await (const message of channel) {
    assert.equal(message.payload, "y");
    break;
  }
  assert.equal((await connection.expect("ack")).offset, 10);
  connection.send("acked", { offset: 10 });
  await within(channel.close(), "the end, for which a loop that was left is not waited");
  assert.equal(connection.waiting, 0);
});

test("a loop that is left acknowledges by hand, and can be taken up again", async (t) => {
  const { channel, connection } = await joined(t);
  bring(connection, { 10: "x", 20: "y" });
  for await (const message of channel) {
    channel.ack(message);
    break;
  }
  assert.equal((await connection.expect("ack")).offset, 10);
  assert.equal((await within(channel.next(), "a message")).value.payload, "y");
});

test("messages come to a handler one by one, and are acknowledged behind it", async (t) => {
  const calls = [];
  let release;
  const handle = async ({ payload }) => {
    calls.push(payload);
    await new Promise((resolve) => (release = resolve));
  };
  const { channel, connection } = await joined(t, { handle });
  bring(connection, { 10: "x", 20: "y" });
  await until(() => calls.length === 1);
  assert.equal(connection.waiting, 0);
  release();
  assert.equal((await connection.expect("ack")).offset, 10);
  assert.deepEqual(calls, ["x", "y"]);
  await assert.rejects(channel.next(), LocalProtocolError);
});

test("a handler that fails ends the channel: its message comes next time", async (t) => {
  const reported = t.mock.method(console, "error", () => {});
  const failure = new Error("no");
  const handle = ({ payload }) => {
    if (payload === "bad") throw failure;
  };
  const { channel, connection } = await joined(t, { handle });
  bring(connection, { 10: "good", 20: "bad", 30: "never" });
  await state(channel, "closed");
  assert.equal((await connection.expect("ack")).offset, 10);
  await connection.closed();
  assert.equal(connection.waiting, 0);
  assert.equal(channel.error, failure);
  assert.equal(reported.mock.calls[0].arguments[0], failure);
  await assert.rejects(channel.send("x"), failure);
});

test("a snapshot is restored before any message behind it, then acknowledged", async (t) => {
  const calls = [];
  const peer = await listen(t, { codec });
  const channel = open(t, peer, {
    restore: async (restored) => {
      await new Promise(setImmediate);
      calls.push(restored);
    },
    handle: ({ payload }) => calls.push(payload),
  });
  channel.on("missed", (told) => calls.push(told));
  const snapshot = { offset: 88, epoch: 1, bytes: "AQI=" };
  const missed = { messages: 3, reason: "destroyed" };
  const connection = await rejoin(peer, { cursor: 88, start: 88, end: 99, snapshot, missed });
  bring(connection, { 99: "x" });
  assert.equal((await connection.expect("ack")).offset, 88);
  connection.send("acked", { offset: 88 });
  assert.equal((await connection.expect("ack")).offset, 99);
  const restored = { offset: 88, epoch: 1, bytes: new Uint8Array([1, 2]), missed };
  assert.deepEqual(calls, [missed, restored, "x"]);
});

test("what was not taken before a snapshot is not given behind it", async (t) => {
  const calls = [];
  const restore = (snapshot) => calls.push(snapshot.payload);
  const { peer, channel, connection } = await joined(t, { restore });
  bring(connection, { 10: "x", 20: "y" });
  calls.push((await within(channel.next(), "a message")).value.payload);
  connection.destroy();
  await state(channel, "disconnected");
  const snapshot = { offset: 20, epoch: 2, payload: "x and y" };
  const next = await rejoin(peer, { cursor: 20, start: 20, end: 20, snapshot });
  await within(channel.connected(), "JOINED");
  bring(next, { 30: "z" });
  calls.push((await within(channel.next(), "a message")).value.payload);
  assert.deepEqual(calls, ["x", "x and y", "z"]);
  assert.equal((await next.expect("ack")).offset, 20, "and nothing for what was done before it");
});

test("a state that could not be restored is not acknowledged", async (t) => {
  const peer = await listen(t, { codec });
  const failure = new Error("no");
  const restore = () => Promise.reject(failure);
  const channel = open(t, peer, { restore });
  const snapshot = { offset: 88, epoch: 1, payload: 1 };
  const connection = await rejoin(peer, { cursor: 88, start: 88, end: 88, snapshot });
  await assert.rejects(within(channel.next(), "the failure"), failure);
  await connection.closed();
  assert.equal(connection.waiting, 0);
  assert.equal(channel.state, "closed");
});

test("without a snapshot what was missed is told of all the same", async (t) => {
  const calls = [];
  const peer = await listen(t, { codec });
  const channel = open(t, peer, { restore: () => calls.push("never") });
  channel.on("missed", (told) => calls.push(told));
  const missed = { messages: null, reason: "lost" };
  const connection = await rejoin(peer, { cursor: 88, start: 88, end: 99, missed });
  bring(connection, { 99: "x" });
  calls.push((await within(channel.next(), "a message")).value.payload);
  const messages = [{ offset: 120, processor: "b", number: 2, ms: 7, payload: "z" }];
  connection.send("messages", { count: 1, messages, more: false, lost: 2 });
  calls.push((await within(channel.next(), "a message")).value.payload);
  assert.deepEqual(calls, [missed, "x", { messages: 2, reason: "lost" }, "z"]);
  assert.equal((await connection.expect("ack")).offset, 88);
});

test("who is replaced or not let in hears why, everywhere, and does not come again", async (t) => {
  for (const [code, say] of [
    ["replaced", (connection) => connection.send("left", { reason: "replaced" })],
    ["left", (connection) => connection.send("left", { reason: "left" })],
    ["wrong-credentials", (connection) => refuse(connection, undefined, "wrong-credentials")],
  ]) {
    const { peer, channel, connection } = await joined(t);
    const sent = channel.send("x");
    const next = channel.next();
    const room = channel.flush();
    say(connection);
    for (const promise of [sent, next, room]) await assert.rejects(promise, { code });
    assert.deepEqual([channel.state, channel.error.code], ["closed", code]);
    await assert.rejects(channel.connected(), { code });
    await connection.closed();
    const other = open(t, peer);
    await rejoin(peer);
    await within(other.connected(), "a connection that is not the ended channel's");
  }
});

test("a channel that ended is no unhandled rejection of what was sent", async (t) => {
  const peer = await listen(t, { codec });
  const module = JSON.stringify(new URL("../channel.js", import.meta.url).href);
  const script = `
    import { joinChannel } from ${module};
    const channel = joinChannel("${urlOf(peer)}", { processor: "a" });
    channel.send("x");
    await new Promise((resolve) => {
      channel.on("state", (state) => state === "closed" && resolve());
    });
    console.log(channel.error.code);
  `;
  const args = ["--experimental-websocket", "--input-type=module", "--eval", script];
  const ran = promisify(execFile)(process.execPath, args, { timeout: 60_000 });
  const connection = await rejoin(peer);
  connection.send("left", { reason: "replaced" });
  assert.equal((await ran).stdout, "replaced\n");
});

test("the state is asked for and uploaded, also over a lost connection", async (t) => {
  const { peer, channel, connection } = await joined(t);
  const snapshot = channel.snapshot();
  const uploaded = channel.upload({ a: 1 }, 26);
  await connection.expect("snapshot");
  connection.destroy();
  const next = await rejoin(peer);
  await next.expect("snapshot");
  next.send("snapshot", { snapshot: { offset: 3, epoch: 1, payload: "s" } });
  assert.deepEqual(await within(snapshot, "it"), { offset: 3, epoch: 1, payload: "s" });
  const { offset, payload } = await next.expect("upload");
  assert.deepEqual([offset, payload], [26, { a: 1 }]);
  next.send("uploaded", { offset: 30 });
  assert.equal(await within(uploaded, "the answer"), 30);
});

test("closing waits for what was sent and for acknowledgements, up to a bound", async (t) => {
  const { channel, connection } = await joined(t, { handle: () => {} });
  bring(connection, { 10: "x" });
  await connection.expect("ack");
  const accepted = channel.send("x");
  await connection.expect("send");
  const closed = channel.close({ flushMs: 60_000 });
  connection.send("sent", { number: 1, offset: 2 });
  await within(accepted, "the answer");
  await new Promise(setImmediate);
  assert.equal(channel.state, "connected", "the acknowledgement is under way");
  connection.send("acked", { offset: 10 });
  await within(closed, "the end");
  await connection.closed();
  await assert.rejects(channel.send("y"), ClientClosedError);
  const others = await joined(t);
  const sent = others.channel.send("x");
  await assert.rejects(others.channel.close({ flushMs: 20 }), (error) => {
    assert.ok(error instanceof UnacknowledgedError);
    assert.equal(error.message, "1 sends were not acknowledged before the client closed");
    return error.publishes === 1;
  });
  await assert.rejects(sent, ClientClosedError);
  assert.deepEqual(await others.channel.next(), { value: undefined, done: true });
});

test("leaving is done when the server says so, and ends the channel", async (t) => {
  const { channel, connection } = await joined(t);
  channel.send("x");
  const left = channel.leave({ timeoutMs: 60_000 });
  await connection.expect("send");
  connection.send("sent", { number: 1, offset: 2 });
  await connection.expect("leave");
  connection.send("left");
  await within(left, "the end");
  assert.equal(channel.state, "closed");
  assert.equal(channel.error, null);
});

test("who could not leave in time is told", async (t) => {
  const { channel, connection } = await joined(t);
  const left = channel.leave({ timeoutMs: 50 });
  await connection.expect("leave");
  await assert.rejects(left, ConnectTimeoutError);
  await assert.rejects(left, /was not left within 50 ms/);
  const other = await joined(t);
  other.channel.send("x");
  await assert.rejects(other.channel.leave({ timeoutMs: 20 }), UnacknowledgedError);
  assert.equal(other.channel.state, "closed");
});

test("a connection on which nothing is heard is left for another", async (t) => {
  const peer = await listen(t, { codec, pongs: false });
  const channel = open(t, peer, { pingIntervalMs: 30 });
  await rejoin(peer);
  await state(channel, "disconnected");
  assert.equal(channel.lastError, "nothing was heard for 30 ms");
  peer.pongs = true;
  await rejoin(peer);
  await within(channel.connected(), "another connection");
});

test("a server that cannot be reached is told of", async (t) => {
  const channel = open(t, { port: 1 });
  const late = channel.connected({ timeoutMs: 50 });
  await assert.rejects(late, /channel "c" was not joined at .* within 50 ms/);
});

test("a URL names the server and the channel", async (t) => {
  const peer = await listen(t, { codec });
  const channel = joinChannel(`${urlOf(peer)}/d%20%2F%C3%A4`, { processor: "a" });
  t.after(() => channel.close({ flushMs: 0 }));
  const connection = await peer.accept();
  await connection.expect("hello");
  assert.equal((await connection.expect("join")).channel, "c/d /ä");
  assert.equal(channel.name, "c/d /ä");
  const targets = [];
  class Target extends EventTarget {
    constructor(target) {
      super();
      targets.push(target);
    }

    close() {}
  }
  for (const url of ["channel://a/c", "channels://a/c", "channel://[::1]:9/c"]) {
    const one = joinChannel(url, { processor: "a", WebSocket: Target });
    await one.close({ flushMs: 0 });
  }
  const expected = ["ws://a:8120", "wss://a", "ws://[::1]:9"].map((host) => `${host}/v1/channels`);
  assert.deepEqual(targets, expected);
  for (const url of [
    ...["", "ws://a/c", "channel://a", "channel://a/", "channel:///c", "channel://a/c?x"],
    ...["channel://a/%ff", "channel://a:x/c", `channel://a/${"x".repeat(248)}`, undefined],
  ]) {
    assert.throws(() => joinChannel(url, { processor: "a" }), ConfigError, url);
  }
});

test("an option that cannot be meant is refused", () => {
  const url = "channel://127.0.0.1:1/c";
  const processor = "a";
  for (const options of [
    ...[{ processor, receive: "pull" }, { processor: "" }, { processor: "x".repeat(256) }],
    ...[{ processor: "a\n" }, { processor: "\ud800" }, { processor, pingIntervalMs: 0 }],
    ...[{}, { processor: 7 }],
  ]) {
    assert.throws(() => joinChannel(url, options), ConfigError);
  }
  for (const options of [{ handle: 1 }, { restore: 1 }, { other: 1 }]) {
    assert.throws(() => joinChannel(url, { processor, ...options }), TypeError);
  }
});

test("channels that share a WebSocket greet once, and open another together when it is silent", async (t) => {
  const peer = await listen(t, { codec, pongs: false });
  const url = urlOf(peer).replace(/\/c$/, "");
  const shared = connectChannels(url, { processor: "p", pingIntervalMs: 400 });
  t.after(() => shared.close({ flushMs: 0 }));
  const channels = [shared.join("a"), shared.join("b")];
  const hellos = [];
  for (let n = 0; n < 2; n += 1) {
    const connection = await peer.accept();
    hellos.push(await connection.expect("hello"));
    connection.send("welcome", { channel: undefined, processor: "p", version: 1, ping_s: 15 });
    const joins = [await connection.expect("join"), await connection.expect("join")];
    assert.deepEqual(joins.map(({ channel }) => channel).toSorted(), ["a", "b"]);
    for (const channel of ["a", "b"]) {
      connection.send("joined", { channel, epoch: 0, start: 0, end: 0, cursor: 0, number: 0 });
    }
    await Promise.all(channels.map((channel) => channel.connected()));
    if (n === 0) await connection.closed(); // nothing is heard any more
    peer.pongs = true;
  }
  assert.equal(hellos[0].instance, hellos[1].instance);
  assert.deepEqual(hellos.map(({ attempt }) => attempt), [1, 2]);
});

test("what cannot be meant of a shared connection is refused", async () => {
  const shared = connectChannels("channel://127.0.0.1:1", { processor: "p" });
  assert.throws(() => shared.join("a", { processor: "q" }), LocalProtocolError);
  assert.throws(() => shared.join(""), ConfigError);
  assert.throws(() => connectChannels("nonsense", { processor: "p" }).join("a"), ConfigError);
  await shared.close();
  assert.throws(() => shared.join("a"), ClientClosedError);
});

function open(t, peer, options = {}) {
  const channel = joinChannel(urlOf(peer), { processor: "a", ...options });
  t.after(() => channel.close({ flushMs: 0 }));
  return channel;
}

function urlOf(peer) {
  return `channel://127.0.0.1:${peer.port}/c`;
}

async function joined(t, options) {
  const peer = await listen(t, { codec });
  const channel = open(t, peer, options);
  const connection = await rejoin(peer);
  await within(channel.connected(), "JOINED");
  return { peer, channel, connection };
}

/** The next connection, welcomed and joined. */
async function rejoin(peer, fields = {}) {
  const connection = await peer.accept();
  assert.equal(connection.path, "/v1/channels");
  const { processor } = await connection.expect("hello");
  connection.send("welcome", { channel: undefined, processor, version: 1, ping_s: 15 });
  await connection.expect("join");
  connection.send("joined", { epoch: 0, start: 0, end: 0, cursor: 0, number: 0, ...fields });
  return connection;
}

function bring(connection, payloads) {
  const messages = Object.entries(payloads).map(([at, payload]) => {
    return { offset: Number(at), processor: "b", number: Number(at), ms: 7, payload };
  });
  connection.send("messages", { count: messages.length, messages, more: false });
}

function refuse(connection, of, code, { number, retry = false } = {}) {
  connection.send("error", { of, code, retry, number, text: "why" });
}

function state(channel, wanted) {
  const reached = new Promise((resolve) => {
    channel.on("state", (now) => {
      if (now === wanted) resolve();
    });
  });
  return within(reached, wanted);
}

async function until(condition) {
  while (!condition()) await new Promise(setImmediate);
}
