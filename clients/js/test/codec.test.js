// The codec: bytes that another MessagePack library made, and bytes that no library would make.

import assert from "node:assert/strict";
import test from "node:test";

import { CodecError, decode, encode } from "../headrace.js";
import { random } from "./random.js";

// Made by msgspec, which the server uses.
const VECTORS = [
  [
    "attach",
    { topic: "foo", serial: "1763186400123@1337" },
    "82a47479706501a661747461636882a5746f706963a3666f6fa673657269616cb2313736333138363430303132334031333337",
  ],
  ["attach", { topic: "é" }, "82a47479706501a661747461636881a5746f706963a2c3a9"],
  [
    "publish",
    { topic: "foo", message: bytes("626172"), sequence_number: 2 ** 32 - 1 },
    "82a47479706503a77075626c69736883a5746f706963a3666f6fa76d657373616765c403626172" +
      "af73657175656e63655f6e756d626572ceffffffff",
  ],
  [
    "ping",
    { timestamp: 1763186400123456 },
    "82a47479706506a470696e6781a974696d657374616d70cf0006439bd30d5a40",
  ],
  ["detach", { topic: "foo" }, "82a47479706508a664657461636881a5746f706963a3666f6f"],
  [
    "attached",
    { topic: "foo", serial: "@7" },
    "82a47479706502a8617474616368656482a5746f706963a3666f6fa673657269616ca24037",
  ],
  [
    "ack",
    { topic: "foo", sequence_number: 258 },
    "82a47479706504a361636b82a5746f706963a3666f6faf73657175656e63655f6e756d626572cd0102",
  ],
  [
    "payload",
    { topic: "foo", serial: "1@7", message: bytes("626172") },
    "82a47479706505a77061796c6f616483a5746f706963a3666f6fa673657269616ca3314037a76d657373616765c403626172",
  ],
  [
    "pong",
    { timestamp: Number.MAX_SAFE_INTEGER },
    "82a47479706507a4706f6e6781a974696d657374616d70cf001fffffffffffff",
  ],
  ["detached", { topic: "foo" }, "82a47479706509a8646574616368656481a5746f706963a3666f6f"],
  [
    "read",
    { topic: "foo", reader: "billing", start: "oldest", instance: 7, window: 8_388_608 },
    "82a47479706540a47265616485a5746f706963a3666f6fa6726561646572a762696c6c696e67a57374617274a66f6c64657374" +
      "a8696e7374616e636507a677696e646f77ce00800000",
  ],
  [
    "handled",
    { topic: "foo", grant: 3, offset: 14, ordinal: 2 },
    "82a47479706544a768616e646c656484a5746f706963a3666f6fa56772616e7403a66f66667365740ea76f7264696e616c02",
  ],
];

test("what a server says about named readers is read", () => {
  const reading =
    "82a47479706542a772656164696e6787a5746f706963a3666f6fa56772616e7403a561736b656407a56578616374c3" +
    "a565706f6368cf0000019a86195b7ba66f666673657407a76f7264696e616c01";
  assert.deepEqual(decode(bytes(reading)), {
    ...{ name: "reading", topic: "foo", grant: 3, asked: 7, exact: true },
    ...{ epoch: 1763186400123, offset: 7, ordinal: 1 },
  });
  const records =
    "82a47479706543a77265636f72647386a5746f706963a3666f6fa565706f6368cf0000019a86195b7ba66f666673657407" +
    "a76f7264696e616c01a474696d65cf0000019a86195cf4a77265636f726473c40700000003626172";
  assert.deepEqual(decode(bytes(records)), {
    ...{ name: "records", topic: "foo", epoch: 1763186400123, offset: 7, ordinal: 1 },
    ...{ time: 1763186400500, records: bytes("00000003626172") },
  });
  assert.throws(() => decode(bytes(reading.replace("c3", "07"))), CodecError);
});

for (const [name, fields, hex] of VECTORS) {
  test(`${name} ${JSON.stringify(fields)} has these bytes`, () => {
    assert.equal(Buffer.from(encode(name, fields)).toString("hex"), hex);
    assert.deepEqual(decode(bytes(hex)), { name, ...fields });
  });

  test(`${name} ${JSON.stringify(fields)} is refused when cut anywhere`, () => {
    const whole = bytes(hex);
    for (let size = 0; size < whole.length; size += 1) {
      assert.throws(() => decode(whole.subarray(0, size)), CodecError);
    }
    assert.throws(() => decode(Uint8Array.of(...whole, 0)), /bytes behind the message/);
  });
}

test("numbers, text and bytes of every length come back as they went", () => {
  const around = (exponent) => [2 ** exponent - 1, 2 ** exponent, 2 ** exponent + 1];
  for (const timestamp of [0, 5, 7, 8, 16, 31, 32, 33, 52].flatMap(around)) {
    assert.equal(decode(encode("ping", { timestamp })).timestamp, timestamp);
  }
  for (const length of [0, 4, 5, 8, 16].flatMap(around)) {
    const topic = "x".repeat(length);
    assert.equal(decode(encode("detach", { topic })).topic, topic);
    const message = Uint8Array.from({ length }, (_, index) => index);
    const fields = { topic: "\u{1f30a}é", message, sequence_number: 0 };
    assert.deepEqual(decode(encode("publish", fields)), { name: "publish", ...fields });
  }
});

test("text is kept to the letter, a byte order mark included", () => {
  assert.equal(decode(encode("detach", { topic: "\ufefftopic" })).topic, "\ufefftopic");
});

test("bytes may also come as text or as an array of integers", () => {
  const payload = (message) => {
    const fields = map("topic", text("t"), "serial", text("s"), "message", message);
    return decode(map("type", "05", "payload", fields));
  };
  assert.deepEqual(payload(text("é")).message, bytes("c3a9"));
  assert.deepEqual(payload("93" + "00" + "cc80" + "ccff").message, bytes("0080ff"));
  assert.throws(() => payload("91" + "cd0100"), /256 where an integer from 0 to 255/);
  assert.throws(() => payload("91" + "ff"), CodecError);
  assert.throws(() => payload("92" + "01"), CodecError);
  assert.throws(() => payload("80"), /map where bytes are due/);
});

test("a number may be written longer than it needs, or as a float", () => {
  for (const written of ["07", "cc07", "cd0007", "ce00000007", "cf0000000000000007"]) {
    assert.deepEqual(decode(map("type", written, "pong", map("timestamp", "01"))).timestamp, 1);
  }
  assert.equal(
    decode(map("type", "07", "pong", map("timestamp", "cb4000000000000000"))).timestamp,
    2,
  );
});

test("a type is a uint16, and a sequence number a uint32", () => {
  for (const written of ["ff", "d0ff", "ce00010000", "cb3ff8000000000000", "c0", "c3", text("7")]) {
    assert.throws(() => decode(map("type", written, "pong", map("timestamp", "01"))), CodecError);
  }
  const ack = (number) => decode(map("type", "04", "ack", map("sequence_number", number)));
  assert.equal(ack("ceffffffff").sequence_number, 2 ** 32 - 1);
  assert.throws(() => ack("cf0000000100000000"), CodecError);
});

test("the order of keys does not matter, and unset messages may be nil", () => {
  const pong = map("pong", map("timestamp", "05"), "attached", "c0", "ack", "c0", "type", "07");
  assert.deepEqual(decode(pong), { name: "pong", timestamp: 5 });
});

test("unknown keys are passed over, whatever they hold", () => {
  const values = [
    ...["c0", "c2", "c3", "00", "7f", "e0", "ff"],
    ...["cc01", "cd0102", "ce01020304", "cf0102030405060708"],
    ...["d001", "d10102", "d201020304", "d30102030405060708", "ca01020304", "cb0102030405060708"],
    ...["a0", "a161", "d90161", "da000161", "db0000000161", "a1ff"],
    ...["c400", "c40101", "c5000101", "c60000000101"],
    ...["d40100", "d5010000", "d60100000000", `d701${"00".repeat(8)}`, `d801${"00".repeat(16)}`],
    ...["c70001", "c7010100", "c800010100", "c9000000010100"],
    ...["90", "9101", "dc000101", "dd0000000101", "80", "810102", "de00010102", "df000000010102"],
    ...["92910193c0c2c3", "8181a1610181c0c3"],
  ];
  for (const value of values) {
    const expected = { name: "pong", timestamp: 1 };
    const pong = map("timestamp", "01");
    assert.deepEqual(decode(map("new", value, "type", "07", "pong", pong)), expected, value);
    const wider = map("new", value, "timestamp", "01");
    assert.deepEqual(decode(map("pong", wider, "type", "07")), expected, value);
  }
});

test("keys that are no text are passed over", () => {
  const pong = `81${text("timestamp")}01`;
  for (const key of ["05", "c0", "9101", "810102", "c40101"]) {
    const message = `83${key}01${text("type")}07${text("pong")}${pong}`;
    assert.deepEqual(decode(bytes(message)), { name: "pong", timestamp: 1 }, key);
  }
});

test("an unknown type is a message without a name", () => {
  assert.deepEqual(decode(map("type", "cd0100", "novel", "c0")), {});
});

test("what is no message is refused with a reason", () => {
  assert.throws(() => decode("text"), /a text message/);
  assert.throws(() => decode(bytes("93010203")), /array where map is due/);
  assert.throws(() => decode(map("pong", map("timestamp", "01"))), /without type/);
  assert.throws(() => decode(map("type", "07")), /type 7 without "pong"/);
  assert.throws(() => decode(map("type", "07", "pong", map())), /"pong" without "timestamp"/);
  assert.throws(
    () => decode(map("type", "07", "pong", map("timestamp", "c0"))),
    /without "timestamp"/,
  );
  assert.throws(() => decode(map("type", "09", "detached", map("topic", "a1ff"))), /not UTF-8/);
  assert.throws(() => decode(map("type", "07", "new", "c1")), /begins no value/);
});

test("an announced length is compared with what is there, at once", () => {
  const announced = {
    ...{ dbffffffff: 4294967295, c6ffffffff: 4294967295, c9ffffffff01: 4294967296 },
    ...{ ddffffffff: 4294967295, dfffffffff: 8589934590 },
  };
  for (const [value, count] of Object.entries(announced)) {
    const refusal = new RegExp(`^CodecError: ${count} bytes or values announced, `);
    assert.throws(() => decode(map("type", "07", "new", value)), refusal);
    assert.throws(() => decode(bytes(`82${text("type")}05${value}`)), refusal);
  }
  const message = map("topic", text("t"), "serial", text("s"), "message", "ddffffffff");
  assert.throws(() => decode(map("type", "05", "payload", message)), /4294967295 bytes or values/);
});

test("deep nesting costs neither stack nor much time", () => {
  const depth = 1_000_000;
  for (const opening of ["91", "81c0", "9181a0"]) {
    const nested = `${opening.repeat(depth)}c0`;
    const message = map("new", nested, "type", "07", "pong", map("timestamp", "01"));
    assert.deepEqual(decode(message), { name: "pong", timestamp: 1 });
    assert.throws(() => decode(bytes(opening.repeat(depth))), CodecError);
  }
});

test("random and damaged bytes are decoded or refused, nothing else", () => {
  const { below } = random(1);
  const seeds = VECTORS.map(([, , hex]) => bytes(hex));
  for (let round = 0; round < 20_000; round += 1) {
    const data =
      round % 2
        ? Uint8Array.from({ length: below(40) }, () => below(256))
        : damaged(seeds[below(seeds.length)], below);
    try {
      decode(data);
    } catch (error) {
      assert(error instanceof CodecError, `${error} at ${hexOf(data)}`);
    }
  }
});

function damaged(seed, below) {
  const data = Uint8Array.from(seed);
  for (let left = 1 + below(3); left > 0; left -= 1) data[below(data.length)] = below(256);
  return data;
}

function bytes(hex) {
  return typeof hex === "string" ? Uint8Array.from(Buffer.from(hex, "hex")) : hex;
}

function hexOf(data) {
  return typeof data === "string" ? data : Buffer.from(data).toString("hex");
}

function text(value) {
  const data = Buffer.from(value);
  assert(data.length < 32);
  return hexOf([0xa0 | data.length, ...data]);
}

/** A map of text keys to values that are already MessagePack. */
function map(...pairs) {
  const parts = pairs.map((part, index) => (index % 2 ? hexOf(part) : text(part)));
  return bytes(hexOf([0x80 | (pairs.length / 2)]) + parts.join(""));
}
