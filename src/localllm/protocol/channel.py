"""Framing: each message is a 4-byte little-endian length and that many bytes of msgpack.

Both ends speak over an inherited Unix socketpair. `Channel` blocks and belongs to a runner's threads; `AsyncChannel` is
the daemon's end. Receiving returns None when the other side is gone: that is the normal end of a channel, not an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 << 20
_HEADER = struct.Struct("<I")

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FrameTooLarge(ValueError):
    """The peer announced a frame over MAX_FRAME_BYTES: the stream is not ours or is damaged."""


def _length(header: bytes) -> int:
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


class Channel(Generic[Sent, Received]):
    """The blocking end. `receive` belongs to one thread; `send` may be called from several."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._send_lock = threading.Lock()

    def send(self, message: Sent) -> bool:
        """True when the message was handed to the kernel; False when the other side is gone."""
        with self._send_lock:
            body = self._encoder.encode(message)
            try:
                self._socket.sendall(_HEADER.pack(len(body)) + body)
            except (BrokenPipeError, ConnectionError):
                return False
        return True

    def receive(self) -> Received | None:
        """The next message, or None at the end of the channel.

        Raises FrameTooLarge or msgspec.MsgspecError when the bytes are not a message.
        """
        header = self._read(_HEADER.size)
        body = self._read(_length(header)) if header is not None else None
        return None if body is None else self._decoder.decode(body)

    def _read(self, size: int) -> bytes | None:
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionError:
                return None
            if count == 0:
                return None
            done += count
        return bytes(buffer)

    def close(self) -> None:
        self._socket.close()


class AsyncChannel(Generic[Sent, Received]):
    """The daemon's end: one task receives, any task sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    @classmethod
    async def open(cls, sock: socket.socket, received: Any) -> AsyncChannel[Sent, Received]:
        """Take over a connected socket. `received` is the type, or union of types, of incoming messages."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, received)

    def send(self, message: Sent) -> None:
        """Queue a message; nothing happens when the other side is gone (the receiver notices)."""
        if not self._writer.is_closing():
            body = self._encoder.encode(message)
            self._writer.write(_HEADER.pack(len(body)) + body)

    async def receive(self) -> Received | None:
        """As Channel.receive."""
        try:
            header = await self._reader.readexactly(_HEADER.size)
            body = await self._reader.readexactly(_length(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return self._decoder.decode(body)

    def hang_up(self) -> None:
        """End the channel at once; what was not yet sent is dropped, and `receive` returns None."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
