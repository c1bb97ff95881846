// What a client goes through with a real server, in Node and in a browser alike. Each scenario is given
// `connect`, the server's URL and `report(name, facts)`, by which the test hears how far it is.

/**
 * Publish and subscribe while the test, told that half is done, kills the server and starts it again.
 * Then resume in a second client, from a serial that the first had in the middle.
 */
export async function crash({ connect, url, report }) {
  const half = 500;
  const client = connect(url, { windowMax: 32 });
  const states = [];
  const missed = [];
  const received = [];
  const acknowledged = [];
  const disconnected = new Promise((resolve) => {
    client.on("state", (state) => {
      states.push(state);
      if (state === "disconnected") resolve();
    });
  });
  client.on("missed", (event) => missed.push(event));
  let published = 0;
  const publish = async () => {
    await client.window();
    const number = published++;
    client.publish("numbers", `${number}`).then(() => acknowledged.push(number));
  };

  const subscription = client.subscribe("numbers", { from: "start" });
  await subscription.attached();
  const last = new Promise((resolve) => collect(subscription, received, resolve));

  while (published < half) await publish();
  report("half", {});
  // On and on until the server is gone, so that publishes are under way at that moment.
  let gone = false;
  disconnected.then(() => (gone = true));
  while (!gone) await Promise.race([publish(), disconnected]);
  const enough = published + half;
  while (published < enough) await publish();
  await client.flush();
  await client.publish("numbers", "last");
  await last;

  const middle = received[half];
  await client.close();
  const second = connect(url);
  second.on("missed", (event) => missed.push(event));
  const resumed = [];
  await new Promise((resolve) => {
    collect(second.subscribe("numbers", { serial: middle.serial }), resumed, resolve);
  });
  await second.close();

  report("done", {
    ...{ published, states, missed, acknowledged, half },
    received: received.map(({ offset, text }) => [offset, text]),
    resumed: resumed.map(({ offset, text }) => [offset, text]),
  });
}

async function collect(subscription, received, done) {
  for await (const message of subscription) {
    const text = message.text();
    received.push({ offset: message.nextOffset, serial: message.serial, text });
    if (text === "last") done();
  }
}

/** Take messages slowly, in a client that may keep very few of them. */
export async function slow({ connect, url, report }) {
  const count = 2000;
  let detached = 0;
  class Watched extends WebSocket {
    send(data) {
      if (new TextDecoder().decode(data).includes("detach")) detached += 1;
      super.send(data);
    }
  }
  const client = connect(url, { receiveBytesMax: 20_000, WebSocket: Watched });
  for (let n = 0; n < count; n += 1) client.publish("slow", `${n} ${"x".repeat(100)}`);
  await client.flush();
  const received = [];
  for await (const message of client.subscribe("slow", { from: "start" })) {
    received.push(Number(message.text().split(" ")[0]));
    if (received.length % 50 === 0) await new Promise((resolve) => setTimeout(resolve, 1));
    if (received.length === count) break;
  }
  await client.close();
  report("done", { received, detached });
}

/** Every kind of payload, and what comes of a topic that is left. */
export async function payloads({ connect, url, report }) {
  const client = connect(url);
  await client.connected();
  const payloads = [
    ...["", "text", "\u{1f30a}", new Uint8Array(256).map((_, index) => index)],
    ...[new Uint8Array(65_536).fill(7), new Uint8Array(262_144).fill(8)],
  ];
  const subscription = client.subscribe("payloads");
  const began = await subscription.attached();
  for (const payload of payloads) await client.publish("payloads", payload);
  const received = [];
  while (received.length < payloads.length) received.push((await subscription.next()).value);
  await subscription.unsubscribe();
  await client.publish("payloads", "unheard");
  const ended = await subscription.next();
  const latencyMs = client.latencyMs;
  await client.close();
  report("done", {
    ...{ began, latencyMs, ended: ended.done, state: client.state, lastError: client.lastError },
    offsets: received.map((message) => [message.offset, message.nextOffset]),
    payloads: received.map((message) => [message.payload.length, sum(message.payload)]),
  });
}

function sum(bytes) {
  return bytes.reduce((total, byte) => (total * 31 + byte) % 1_000_003, 0);
}

/** Whether the server lets this page in. */
export async function admission({ connect, url, report }) {
  const client = connect(url);
  const state = await new Promise((resolve) => client.on("state", resolve));
  report("done", { state });
  await client.close();
}

/** A named reader that resumes, waits, takes over and acknowledges. */
export async function readers({ connect, url, report }) {
  const publisher = connect(url);
  for (let n = 0; n < 5; n += 1) publisher.publish("orders", `${n}`);
  await publisher.flush();

  const one = connect(url);
  const orders = one.subscribe("orders", { reader: "billing" });
  const first = [];
  for await (const message of orders) {
    first.push(message);
    if (first.length === 3) break; // the third is not acknowledged: no next one was asked for
  }
  await orders.flush();

  const two = connect(url);
  const changes = [];
  const waits = new Promise((resolve) => {
    two.on("reader", ({ state }) => {
      changes.push(state);
      resolve();
    });
  });
  const next = two.subscribe("orders", { reader: "billing", ack: "manual" });
  await waits;
  await one.close();
  const second = [];
  while (second.length < 3) second.push((await next.next()).value);
  for (const message of second.toReversed()) next.ack(message);
  await next.flush();
  await next.unsubscribe();

  const handled = [];
  two.subscribe(
    "orders",
    async (message) => {
      if (message.text() === "6") throw new Error("poison");
      handled.push(message.text());
    },
    { reader: "billing" },
  );
  const reported = globalThis.reportError;
  globalThis.reportError = () => {};
  const consoleError = console.error;
  console.error = () => {};
  await publisher.publish("orders", "5");
  await publisher.publish("orders", "6");
  const again = await whenPossible(() => two.subscribe("orders", { reader: "billing" }));
  console.error = consoleError;
  globalThis.reportError = reported;
  const third = await again.next();
  const plain = await publisher.subscribe("orders", { from: "start" }).next();

  // A loop that never waits, as of an application that calculates.
  for (let n = 0; n < 2000; n += 1) publisher.publish("sums", `${n}`);
  await publisher.flush();
  const sums = two.subscribe("sums", { reader: "billing" });
  let summed = 0;
  for await (const _ of sums) {
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 20);
    summed += 1;
    if (sums.acknowledged > 0 || summed === 2000) break;
  }
  const refused = await publisher
    .subscribe("others", { reader: "lake" })
    .next()
    .catch((error) => error.name);
  await two.close();
  await publisher.close();
  report("done", {
    first: first.map((message) => message.text()),
    ordinals: first.map(({ ordinal }) => ordinal),
    times: first.map(({ time }) => time),
    epochs: first.map(({ epoch }) => epoch),
    acknowledged: orders.acknowledged,
    second: second.map((message) => message.text()),
    ...{ changes: changes.slice(0, 2), handled, third: third.value.text(), refused, summed },
    plain: [plain.value.ordinal, plain.value.time],
    plainEpoch: plain.value.epoch,
  });
}

/** A topic is subscribed once: again only when the subscription before it has ended. */
async function whenPossible(subscribe) {
  for (;;) {
    try {
      return subscribe();
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
  }
}
