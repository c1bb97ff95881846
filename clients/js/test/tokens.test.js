// Tokens and tickets: when they are shown, renewed and refused, and where they are never sent.

import assert from "node:assert/strict";
import test from "node:test";

import { joinChannel } from "../channel.js";
import { connectChannels } from "../channel_connection.js";
import {
  ConfigError,
  ConnectTimeoutError,
  RefusedError,
  WombatSession,
  connect,
  decode,
  encode,
} from "../headrace.js";
import { listen, within } from "./peer.js";

const PATIENT = { pingIntervalMs: 60_000, resendMs: 60_000 };

test("the token comes before everything else, and all else after the answer", async (t) => {
  const { client, connection } = await open(t, { token: "abc" });
  client.publish("t", "x");
  client.subscribe("t");
  assert.equal((await connection.expect("auth")).token, "abc");
  assert.equal(client.state, "connecting");
  connection.send("auth_ok", { valid_ms: 0 });
  await connection.expect("attach");
  await connection.expect("publish");
  assert.equal(connection.path, "/v1/ws"); // a token is never in the URL
});

test("a client without a token shows none", async (t) => {
  const { client, connection } = await open(t, {});
  client.publish("t", "x");
  await connection.expect("publish");
});

test("a function is asked for each connection", async (t) => {
  let asked = 0;
  const { peer, connection } = await open(t, { token: async () => `token${asked++}` });
  assert.equal((await connection.expect("auth")).token, "token0");
  connection.send("auth_ok", { valid_ms: 0 });
  connection.destroy();
  assert.equal((await (await peer.accept()).expect("auth")).token, "token1");
});

test("a ticket goes into the URL, a new one for each connection", async (t) => {
  let asked = 0;
  const { peer, connection } = await open(t, { ticket: () => `ticket+${asked++}` });
  assert.equal(connection.path, "/v1/ws?ticket=ticket%2B0");
  connection.destroy();
  assert.equal((await peer.accept()).path, "/v1/ws?ticket=ticket%2B1");
});

test("a function that fails delays the connection and is named", async (t) => {
  const peer = await listen(t);
  for (const token of [() => Promise.reject(new Error("the issuer is down")), () => 7, () => ""]) {
    const client = connect(peer.url, { ...PATIENT, token });
    t.after(() => client.close({ flushMs: 0 }));
    await assert.rejects(client.connected({ timeoutMs: 50 }), (error) => {
      return error instanceof ConnectTimeoutError && /the function for the token/.test(error.message);
    });
  }
});

test("a refused token ends the client and everything that waits", async (t) => {
  const { client, connection } = await open(t, { token: "s3cret" });
  const published = client.publish("t", "x");
  const subscription = client.subscribe("t");
  const next = subscription.next();
  await connection.expect("auth");
  connection.send("auth_refused", { code: 1, reason: "unknown token" });
  for (const waiting of [published, next, client.connected()]) {
    await within(
      assert.rejects(waiting, (error) => {
        return error instanceof RefusedError && !error.message.includes("s3cret");
      }),
      "a refusal",
    );
  }
  assert.equal(client.state, "closed");
  await assert.rejects(subscription.next(), RefusedError);
  assert.throws(() => client.subscribe("u"), RefusedError);
  await connection.closed();
});

test("another token is tried a few times, and the same token only once more", async (t) => {
  for (const [token, times] of [[counting(), 3], [() => "same", 2]]) {
    const { client, peer, connection } = await open(t, { token });
    for (let n = 0, present = connection; ; present = await peer.accept()) {
      await present.expect("auth");
      present.send("auth_refused", { code: 1, reason: "expired" });
      if (++n === times) break;
    }
    await assert.rejects(client.connected(), RefusedError);
  }
});

test("a server that cannot check now is asked again", async (t) => {
  const { client, peer, connection } = await open(t, { token: "abc" });
  await connection.expect("auth");
  connection.send("auth_refused", { code: 2, reason: "too many attempts" });
  const second = await peer.accept();
  await second.expect("auth");
  second.send("auth_ok", { valid_ms: 0 });
  await within(client.connected(), "a connection");
});

test("a server without the extension is named", async (t) => {
  const peer = await listen(t);
  const client = connect(peer.url, { ...PATIENT, token: "abc" });
  t.after(() => client.close({ flushMs: 0 }));
  (await peer.accept()).close("1002 unknown message type 80");
  await within(
    new Promise((resolve) => {
      client.on("state", (state) => state === "disconnected" && resolve());
    }),
    "the end",
  );
  assert.match(client.lastError, /does not know the token extension/);
});

test("a token is renewed on the open connection before it expires", () => {
  const session = new WombatSession({ token: () => "" });
  session.connecting();
  session.token = "first";
  session.opened(0);
  assert.deepEqual(names(session), ["auth"]);
  session.receive(message("auth_ok", { valid_ms: 10_000 }), 0);
  assert.equal(session.renewAt, 8000);
  assert.deepEqual(names(session), ["ping"]);
  session.renewAt = Infinity;
  session.renew("second", 8000);
  assert.deepEqual(names(session), ["auth"]);
  assert.deepEqual(session.receive(message("auth_ok", { valid_ms: 10_000 }), 8000), []);
  assert.equal(session.renewAt, 16_000);
});

test("the link asks for a new token when it is time", async (t) => {
  let asked = 0;
  const { connection } = await open(t, { token: () => `token${asked++}` });
  await connection.expect("auth");
  connection.send("auth_ok", { valid_ms: 1 });
  assert.equal((await connection.expect("auth")).token, "token1");
});

test("a silent server is given up", () => {
  const session = new WombatSession();
  session.connecting();
  session.token = "abc";
  session.opened(0);
  assert.equal(session.tickAt, 5000);
  assert.deepEqual(session.tick(4999), []);
  assert.match(session.tick(5000)[0].reason, /does not know the token extension/);
});

test("nothing counts before the answer", () => {
  const session = new WombatSession();
  session.connecting();
  session.token = "abc";
  session.opened(0);
  const [event] = session.receive(message("pong", { timestamp: 1 }), 0);
  assert.equal(event.kind, "broken");
  assert.equal(session.state, "connecting");
});

test("credentials are not sent in clear text to another machine", () => {
  const join = (url, options) => joinChannel(url, { processor: "p", ...options });
  for (const [make, scheme] of [[connect, "ws"], [join, "channel"]]) {
    for (const options of [{ token: "abc" }, { token: () => "abc" }, { ticket: () => "abc" }]) {
      for (const host of ["example.com", "10.0.0.1", "127.0.0.1.example.com", "localhost.example"]) {
        assert.throws(() => make(`${scheme}://${host}:1/c`, options), (error) => {
          return error instanceof ConfigError && /insecureToken: true/.test(error.message);
        });
      }
    }
  }
});

test("credentials of a wrong form are refused at once and not shown", () => {
  for (const token of ["", "a b", "a\nb", "é", 7, null, "x".repeat(8193)]) {
    assert.throws(() => connect("ws://127.0.0.1:2", { token }), (error) => {
      return error instanceof ConfigError && !/a b|é/.test(error.message);
    });
  }
});

const CHANNEL_CODEC = {
  decode: (data) => named(JSON.parse(data)),
  encode: (name, fields) => JSON.stringify({ type: name, ...fields }),
};

test("channels of one connection need one ticket for each WebSocket", async (t) => {
  const peer = await listen(t, { codec: CHANNEL_CODEC });
  const given = [];
  const ticket = () => {
    given.push(`ticket${given.length}`);
    if (given.length === 2) throw new Error("the application is down"); // and it is asked again
    return given.at(-1);
  };
  const url = peer.url.replace("ws", "channel");
  const shared = connectChannels(url, { processor: "p", pingIntervalMs: 60_000, ticket });
  t.after(() => shared.close({ flushMs: 0 }));
  for (const name of ["a", "b", "c"]) shared.join(name);
  const first = await peer.accept();
  assert.equal(first.path, "/v1/channels?ticket=ticket0");
  await first.expect("hello");
  shared.join("d");
  first.send("welcome", { processor: "p", version: 1, ping_s: 5 });
  const joined = new Set();
  while (joined.size < 4) joined.add((await first.expect("join")).channel);
  assert.deepEqual(given, ["ticket0"]);
  first.destroy();
  assert.equal((await peer.accept()).path, "/v1/channels?ticket=ticket2");
});

test("a channel asks a function for the token of each connection", async (t) => {
  let asked = 0;
  const peer = await listen(t, { codec: CHANNEL_CODEC });
  const channel = joinChannel(`${peer.url.replace("ws", "channel")}/c`, {
    processor: "p",
    token: () => `token${asked++}`,
  });
  t.after(() => channel.close({ flushMs: 0 }));
  const connection = await peer.accept();
  assert.equal((await connection.expect("hello")).token, "token0");
  connection.destroy();
  assert.equal((await (await peer.accept()).expect("hello")).token, "token1");
});

function counting() {
  let asked = 0;
  return () => `token${asked++}`;
}

async function open(t, options) {
  const peer = await listen(t);
  const client = connect(peer.url, { ...PATIENT, ...options });
  t.after(() => client.close({ flushMs: 0 }));
  return { client, peer, connection: await peer.accept() };
}

function named({ type, ...fields }) {
  return { name: type, ...fields };
}

/** The names of the messages that a session has to send. */
function names(session) {
  return session.controlToSend(0).map((data) => decode(data).name);
}

function message(name, fields) {
  return encode(name, fields);
}
