import type { Channel, ChannelOptions } from "./channel.js";

export type JoinOptions = Omit<ChannelOptions, "processor" | "token" | "ticket" | "insecureToken" | "WebSocket">;

/** One WebSocket of a processor, for as many channels as it joins. */
export interface ChannelConnection {
  readonly url: string;
  readonly processor: string;

  /**
   * Join a channel, as `joinChannel` does. Options are those of the connection where they are not
   * given. `close` of the channel ends its messages and leaves the WebSocket to the others; the
   * processor stays a member, as before.
   */
  join(name: string, options?: JoinOptions): Channel;

  /** Close every channel, as `channel.close` does, and with the last one the WebSocket. */
  close(options?: { flushMs?: number }): Promise<void>;
}

/** A connection to `channel://HOST:PORT`. It is made with the first `join`. */
export function connectChannels(url: string, options: ChannelOptions): ChannelConnection;
