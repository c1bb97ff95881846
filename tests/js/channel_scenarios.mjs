// What a client of a channel goes through with a real server, in Node and in a browser alike. Each
// scenario is given `joinChannel`, the server's URL and `report(name, facts)`, as in scenarios.mjs.

export const channelPush = (host) => channelCrash(host, "push");
export const channelSignal = (host) => channelCrash(host, "signal");
export const channelPoll = (host) => channelCrash(host, "poll");

/** The same, where each processor has one connection, and other channels on it. */
export async function channelSharedCrash(host) {
  const connections = new Map();
  const joinChannel = (url, { processor, ...options }) => {
    if (!connections.has(processor)) {
      const connection = host.connectChannels(host.url, { processor });
      for (const name of ["other", "x/y z"]) connection.join(name);
      connections.set(processor, connection);
    }
    return connections.get(processor).join(url.slice(host.url.length + 1), options);
  };
  await channelCrash({ ...host, joinChannel }, "push");
  for (const connection of connections.values()) await connection.close();
}

/** Many channels of one processor: each gets its own messages, and one that is closed can come back. */
export async function channelShared({ connectChannels, joinChannel, url, report }) {
  let opened = 0;
  const Counted = class extends WebSocket {
    constructor(target) {
      super(target);
      opened += 1;
    }
  };
  const connection = connectChannels(url, { processor: "many", WebSocket: Counted });
  const names = Array.from({ length: 20 }, (_, n) => `room/${n}`);
  const rooms = names.map((name) => connection.join(name, { leaseMs: 60_000 }));
  await Promise.all(rooms.map((room) => room.connected()));
  const others = names.map((name) => joinChannel(`${url}/${name}`, { processor: "other" }));
  for (const [n, other] of others.entries()) await other.send({ n });
  const got = [];
  for (const room of rooms) got.push((await room.next()).value.payload.n);
  const echoed = await rooms[7].send("echo").then(() => others[7].next());

  let again;
  try {
    connection.join("room/3");
  } catch (error) {
    again = error.message;
  }
  await rooms[3].close();
  const back = connection.join("room/3", { from: "state", leaseMs: 60_000 });
  await back.connected(); // or the message is in the state already, and does not come
  await others[3].send("later");
  const later = (await back.next()).value.payload;
  await back.leave();
  await rooms[4].close();
  await rooms[5].send("still here");
  await connection.close();
  let over;
  try {
    connection.join("room/3");
  } catch (error) {
    over = error.name;
  }
  for (const other of others) await other.close();
  report("done", { opened, got, echoed: echoed.value.payload, again, later, over });
}

/**
 * Send and receive while the test, told that half is done, kills the server and starts it again;
 * in between, send without a connection.
 */
async function channelCrash({ joinChannel, url, report }, receive) {
  const half = 300;
  const a = joinChannel(`${url}/crash`, { processor: "a", windowMax: 32 });
  const b = joinChannel(`${url}/crash`, { processor: "b", receive, pollIntervalMs: 20 });
  const states = [];
  let offline = 0;
  let sent = 0;
  const accepted = [];
  const send = () => {
    const payload = sent++;
    a.send(payload).then((offset) => accepted.push([payload, offset]));
  };
  const disconnected = new Promise((resolve) => {
    a.on("state", (state) => {
      states.push(state);
      if (state !== "disconnected") return;
      while (offline < 50) offline += (send(), 1);
      resolve();
    });
  });
  await b.connected();

  const received = [];
  const all = (async () => {
    for await (const { nextOffset, processor, number, payload } of b) {
      received.push([nextOffset, processor, number, payload]);
      if (payload === "last") break;
    }
  })();
  while (sent < half) await a.window().then(send);
  report("half", {});
  // On and on until the server is gone, so that sends are under way at that moment.
  let gone = false;
  disconnected.then(() => (gone = true));
  while (!gone) await Promise.race([a.window().then(send), disconnected]);
  await a.connected();
  const enough = sent + half;
  while (sent < enough) await a.window().then(send);
  await a.flush();
  await a.send("last");
  await all;
  await Promise.all([a.close(), b.close()]);
  report("done", { sent, offline, states, accepted, received, half });
}

/** Two come, one of them goes early; then nobody is left. */
export async function channelAbsence({ joinChannel, url, report }) {
  const a = joinChannel(`${url}/document`, { processor: "a" });
  const b = joinChannel(`${url}/document`, { processor: "b" });
  await b.connected();
  await a.send({ title: "x" });
  const { value } = await b.next();
  b.ack(value);
  await b.close();
  await a.send({ body: "y" });
  await a.send({ body: "z" });
  await a.close();
  report("done", { read: value.payload });
}

/** Both come back, the one that has missed something first; and later once more. */
export async function channelReturn({ joinChannel, url, report }) {
  const calls = [];
  const options = {
    processor: "b",
    restore: (snapshot) => calls.push(["restore", snapshot]),
  };
  const b = joinChannel(`${url}/document`, options);
  const a = joinChannel(`${url}/document`, { processor: "a" });
  await a.send({ title: "w" });
  const { value } = await b.next();
  calls.push(["message", value.payload]);
  b.ack(value);
  await b.close();
  const again = joinChannel(`${url}/document`, options);
  await again.connected();
  await a.send({ title: "v" });
  calls.push(["message", (await again.next()).value.payload]);
  await again.close();
  await a.close();
  report("done", { calls });
}

/** Every kind of content, and the last known state. */
export async function channelContents({ joinChannel, url, report }) {
  const contents = [
    ...[null, true, -1.5, "", "\u{1f30a}", [], { a: [{ b: null }] }, "x".repeat(200_000)],
    ...[new Uint8Array(0), Uint8Array.from({ length: 256 }, (_, n) => n)],
    ...[new Uint8Array(200_000).fill(7)],
  ];
  const received = [];
  const b = joinChannel(`${url}/contents`, { processor: "b" });
  await b.connected();
  const a = joinChannel(`${url}/contents`, { processor: "a" });
  const accepted = await Promise.all(contents.map((content) => a.send(content)));
  while (received.length < contents.length) received.push((await b.next()).value);
  const large = await a.send(new Uint8Array(262_144)).catch((error) => error.code);
  const behind = await a.send("behind what was refused");
  await b.close();
  await a.leave();
  report("done", {
    same: received.map(({ payload, bytes }, n) => same(bytes ?? payload, contents[n])),
    offsets: received.map(({ nextOffset }) => nextOffset),
    ...{ accepted, large, behind },
  });
}

function same(one, other) {
  if (!(other instanceof Uint8Array)) return JSON.stringify(one) === JSON.stringify(other);
  return one.length === other.length && one.every((byte, n) => byte === other[n]);
}

/** One processor twice. */
export async function channelReplaced({ joinChannel, url, report }) {
  const first = joinChannel(`${url}/c`, { processor: "a", token: "secret" });
  await first.connected();
  const ended = first.next().catch((error) => [error.name, error.code, error.message]);
  const second = joinChannel(`${url}/c`, { processor: "a", token: "secret" });
  await second.connected();
  report("replaced", { error: await ended, state: first.state, second: second.state });
  await second.close();

  const stranger = joinChannel(`${url}/c`, { processor: "a", token: "guess" });
  const refused = await stranger.connected().catch((error) => error.code);
  const forbidden = joinChannel(`${url}/d`, { processor: "a", token: "secret" });
  const denied = await forbidden.connected().catch((error) => error.code);
  report("done", { refused, denied, state: stranger.state });
}

/** States that a member has made itself. */
export async function channelUploads({ joinChannel, url, report }) {
  const a = joinChannel(`${url}/c`, { processor: "a" });
  const before = await a.snapshot();
  const offset = await a.send("x");
  const uploaded = await a.upload(new Uint8Array([1, 2, 255]), offset);
  const wrong = await a.upload("x", offset + 1).catch((error) => error.code);
  const after = await a.snapshot();
  await a.leave();
  const calls = [];
  const again = joinChannel(`${url}/c`, {
    processor: "a",
    restore: ({ offset, bytes, missed }) => calls.push([offset, [...bytes], missed]),
  });
  await again.connected();
  const other = joinChannel(`${url}/c`, { processor: "b" });
  await other.send("y");
  const { value } = await again.next();
  await again.close();
  await other.close();
  const bytes = [...after.bytes];
  report("done", { before, offset, uploaded, wrong, bytes, calls, last: value.payload });
}
