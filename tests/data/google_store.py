"""A server of the JSON interface of Google Cloud Storage on this machine, for the requests that gcsfs makes."""

import base64
import itertools
import json
import re
import zlib
from contextlib import contextmanager
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # entries per page of a listing, so that there are several


class Objects:
    """Content and generation of each object, by (bucket, name)."""

    def __init__(self) -> None:
        self.content: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.uploads: dict[str, tuple[str, str, bytes]] = {}
        self.requests: list[str] = []
        self.lock, self.generations = Lock(), itertools.count(1)

    def put(self, bucket: str, name: str, data: bytes) -> dict:
        self.content[bucket, name] = data, next(self.generations)
        return self.resource(bucket, name)

    def resource(self, bucket: str, name: str) -> dict:
        data, generation = self.content[bucket, name]
        time = f"2026-01-01T00:00:{generation % 60:02d}.000Z"
        checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        return {
            "kind": "storage#object", "id": f"{bucket}/{name}/{generation}", "name": name, "bucket": bucket,
            "size": str(len(data)), "generation": str(generation), "metageneration": "1", "etag": f"e{generation}",
            "crc32c": checksum, "updated": time, "timeCreated": time, "contentType": "application/octet-stream",
        }  # fmt: skip

    def listing(self, bucket: str, query: dict[str, str]) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for owner, name in sorted(self.content):
            if owner != bucket or not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.resource(bucket, name))
        first = int(query.get("pageToken", 0))
        page = {"kind": "storage#objects", "items": items[first : first + PAGE]}
        if first + PAGE < len(items):
            page["nextPageToken"] = str(first + PAGE)
        return page | ({"prefixes": sorted(prefixes)} if prefixes and not first else {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes | dict | None = None, **headers: str) -> None:
        content = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        self.send_response(status)
        kind = "application/json" if isinstance(body, dict) else "application/octet-stream"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self) -> None:
        self.answer(404, {"error": {"code": 404, "message": "Not Found", "errors": [{"reason": "notFound"}]}})

    def respond(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        objects = self.objects
        with objects.lock:
            objects.requests.append(f"{self.command} {self.path}")
            if url.path.startswith("/upload/"):
                self.upload(unquote(url.path.split("/")[5]), query, body)
                return
            match = re.fullmatch(r"/(?:download/)?storage/v1/b/([^/]+)(/o)?(?:/(.+))?", url.path)
            if match is None:
                self.missing()
                return
            bucket, listed, name = unquote(match[1]), match[2], match[3] and unquote(match[3])
            if not listed:
                self.answer(200, {"kind": "storage#bucket", "name": bucket, "id": bucket})
            elif name is None:
                self.answer(200, objects.listing(bucket, query))
            elif (bucket, name) not in objects.content:
                self.missing()
            elif self.command == "DELETE":
                del objects.content[bucket, name]
                self.answer(204)
            elif query.get("alt") == "media" or url.path.startswith("/download/"):
                self.media(objects.content[bucket, name][0])
            else:
                self.answer(200, objects.resource(bucket, name))

    def media(self, data: bytes) -> None:
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if ranged is None:
            self.answer(200, data)
            return
        first, last = int(ranged[1]), int(ranged[2] or len(data) - 1)
        if first >= len(data):
            self.answer(416, b"")
            return
        part = data[first : last + 1]
        self.answer(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(data)}")

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        objects, kind = self.objects, query["uploadType"]
        if kind == "media":
            self.answer(200, objects.put(bucket, query["name"], body))
        elif kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            about, content = BytesParser(policy=HTTP).parsebytes(head + body).iter_parts()
            name = json.loads(about.get_payload(decode=True))["name"]
            self.answer(200, objects.put(bucket, name, content.get_payload(decode=True)))
        elif "upload_id" not in query:
            name = query.get("name") or json.loads(body)["name"]
            number = str(len(objects.uploads))
            objects.uploads[number] = bucket, name, b""
            host = f"http://{self.headers['Host']}"
            self.answer(
                200,
                {},
                Location=f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}",
            )
        elif self.command == "DELETE":
            objects.uploads.pop(query["upload_id"], None)
            self.answer(499)
        else:
            self.resume(query["upload_id"], body)

    def resume(self, number: str, body: bytes) -> None:
        bucket, name, data = self.objects.uploads[number]
        data += body
        self.objects.uploads[number] = bucket, name, data
        total = self.headers["Content-Range"].rpartition("/")[2]
        if total != "*" and len(data) >= int(total):
            self.answer(200, self.objects.put(bucket, name, data))
        else:
            self.answer(308, b"", Range=f"bytes=0-{len(data) - 1}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = respond


@contextmanager
def google_store():
    """Yield the objects and the address of a server, which ends afterwards."""
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Handler,), {"objects": objects}))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield objects, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
