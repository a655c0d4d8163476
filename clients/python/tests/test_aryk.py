"""Both clients against a daemon: the program that the variable ARYKD names."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Iterator

import aryk
from aryk._wire import Splitter

PASSWORD = "secret: with a colon"
PATIENCE = 20.0


class Daemon:
    """An arykd whose files are all in a temporary directory."""

    def __init__(self, directory: str, *more: str) -> None:
        self.socket = os.path.join(directory, "rpc.sock")
        passwords = Path(directory, "passwords")
        passwords.touch(0o600)
        passwords.write_text(f"test:{PASSWORD}\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.arguments = [
            os.environ["ARYKD"],
            "--rpc-socket", self.socket,
            "--vhost-dir", os.path.join(directory, "vhost"),
            "--rpc-http", f"127.0.0.1:{port}",
            "--rpc-http-auth", str(passwords),
            "--log", "error",
            *more,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.arguments, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(aryk.ConnectionLost), aryk.Client(self.socket) as client:
                client.framework_wait_init()
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.stop()
                raise AssertionError("the daemon does not start")
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


class DaemonCase(unittest.TestCase):
    daemon: Daemon

    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.daemon = Daemon(directory.name)
        cls.addClassCleanup(lambda: cls.daemon.stop())


@contextlib.contextmanager
def stubborn_server() -> Iterator[str]:
    """A listening socket that never answers."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(directory, "socket")
        listener.bind(path)
        listener.listen()
        yield path


class WaitingClient(DaemonCase):
    def setUp(self) -> None:
        self.client = aryk.Client(self.daemon.socket)
        self.addCleanup(self.client.close)

    def test_a_disk_from_its_making_to_its_end(self) -> None:
        client = self.client
        self.assertEqual(client.bdev_null_create(name="d", block_size=512, num_blocks=2048), "d")
        [disk] = client.bdev_get_bdevs(name="d")
        self.assertEqual((disk["num_blocks"], disk["claimed"], disk["product_name"]), (2048, False, "Null disk"))
        self.assertEqual([d["name"] for d in client.bdev_get_bdevs()], ["d"])
        self.assertTrue(client.vhost_create_blk_controller(ctrlr="c", dev_name="d", readonly=True))
        [controller] = client.vhost_get_controllers()
        self.assertTrue(os.path.exists(controller["socket"]))
        self.assertEqual(controller["backend_specific"]["block"]["bdev"], "d")
        self.assertTrue(controller["backend_specific"]["block"]["readonly"])
        [stat] = client.bdev_get_iostat(names=["d"])["bdevs"]
        self.assertEqual((stat["name"], stat["num_read_ops"]), ("d", 0))
        self.assertTrue(client.vhost_delete_controller(ctrlr="c"))
        self.assertTrue(client.bdev_null_delete(name="d"))
        self.assertEqual(client.bdev_get_bdevs(), [])

    def test_errors_are_typed(self) -> None:
        client = self.client
        with self.assertRaises(aryk.RpcError) as raised:
            client.bdev_null_delete(name="nothing")
        error = raised.exception
        self.assertEqual((error.code, error.message, error.errno), (-19, "No such device", errno.ENODEV))
        self.assertTrue(error.is_missing and not error.is_existing)
        self.assertIn("nothing", error.data)
        client.bdev_malloc_create(name="twice", block_size=512, num_blocks=8)
        with self.assertRaises(aryk.RpcError) as raised:
            client.bdev_malloc_create(name="twice", block_size=512, num_blocks=8)
        self.assertTrue(raised.exception.is_existing)
        client.bdev_malloc_delete(name="twice")
        with self.assertRaises(aryk.RpcError) as raised:
            client.call("no_such_method", {"a": 1})
        self.assertEqual((raised.exception.code, raised.exception.errno), (-32601, None))

    def test_every_method_is_there_and_no_other(self) -> None:
        mine = {name for name in dir(aryk.Client) if not name.startswith("_")}
        mine -= {"call", "call_many", "close"}
        # The generator of this client calls it; it has no name in Python.
        self.assertEqual(mine | {"rpc.discover"}, set(self.client.rpc_get_methods()))
        self.assertIn(aryk.__version__, self.client.spdk_get_version()["version"])

    def test_configuration_goes_around(self) -> None:
        client = self.client
        client.bdev_null_create(name="saved", block_size=4096, num_blocks=16)
        saved = client.save_config()
        client.bdev_null_delete(name="saved")
        self.assertTrue(client.load_config(subsystems=saved["subsystems"]))
        self.assertEqual(client.bdev_get_bdevs(name="saved")[0]["block_size"], 4096)
        client.bdev_null_delete(name="saved")

    def test_many_calls_at_once(self) -> None:
        names = [f"many{n}" for n in range(500)]
        create = [("bdev_null_create", {"name": n, "block_size": 512, "num_blocks": 8}) for n in names]
        self.assertEqual(self.client.call_many(create), names)
        # The replies have megabytes, more than a socket's buffer.
        ask: list[tuple[str, dict[str, object]]] = [("bdev_get_bdevs", {})] * 20
        lists = self.client.call_many([*ask, ("bdev_null_delete", {"name": "x"})])
        self.assertEqual([len(disks) for disks in lists[:-1]], [500] * 20)
        self.assertEqual(lists[-1].code, -19)
        self.client.call_many([("bdev_null_delete", {"name": n}) for n in names])
        self.assertEqual(self.client.bdev_get_bdevs(), [])

    def test_threads_may_share_a_client(self) -> None:
        seen: list[bool] = []

        def work(name: str) -> None:
            for _ in range(20):
                made = self.client.bdev_null_create(name=name, block_size=512, num_blocks=8)
                seen.append(made == name and self.client.bdev_null_delete(name=name))

        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, [True] * 80)

    def test_a_call_may_time_out(self) -> None:
        with stubborn_server() as path, aryk.Client(path, timeout=0.1) as client:
            with self.assertRaises(aryk.TimedOut):
                client.spdk_get_version()
        # A late reply is not taken for the reply to the next call.
        self.client.timeout = 0.1
        with self.assertRaises(aryk.TimedOut):
            waits = [("bdev_get_bdevs", {"name": "never", "timeout": 500})]
            self.client.call_many(waits)
        self.client.timeout = PATIENCE
        self.assertIn("version", self.client.spdk_get_version())

    def test_nobody_listens(self) -> None:
        with self.assertRaises(aryk.ConnectionLost):
            aryk.Client("/nowhere.sock").spdk_get_version()

    def test_a_daemon_that_was_restarted_is_found_again(self) -> None:
        self.client.spdk_get_version()
        self.daemon.stop()
        with self.assertRaises(aryk.ConnectionLost):
            self.client.spdk_get_version()
        self.daemon.start()
        self.assertIn("Aryk", self.client.spdk_get_version()["version"])

    def test_http(self) -> None:
        with aryk.Client(self.daemon.url, username="test", password=PASSWORD) as client:
            self.assertEqual(client.bdev_null_create(name="h", block_size=512, num_blocks=8), "h")
            with self.assertRaises(aryk.RpcError) as raised:
                client.bdev_null_create(name="h", block_size=512, num_blocks=8)
            self.assertTrue(raised.exception.is_existing)
            self.assertEqual(client.call_many([("bdev_null_delete", {"name": "h"})]), [True])
        with self.assertRaises(aryk.HttpError) as refused:
            aryk.Client(self.daemon.url, username="test", password="wrong").spdk_get_version()
        self.assertEqual(refused.exception.status, 401)
        with self.assertRaises(aryk.ConnectionLost):
            aryk.Client("http://127.0.0.1:1").spdk_get_version()


class Encrypted(unittest.TestCase):
    @unittest.skipUnless(shutil.which("openssl"), "nothing makes a certificate")
    def test_both_clients_trust_whom_they_are_told_to(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            certificate, key = os.path.join(directory, "certificate"), os.path.join(directory, "key")
            make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            make += ["-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-days", "2"]
            make += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
            subprocess.run(make, check=True, capture_output=True)
            daemon = Daemon(directory, "--rpc-http-tls-cert", certificate, "--rpc-http-tls-key", key)
            self.addCleanup(daemon.stop)
            url, trust = daemon.url.replace("http:", "https:"), ssl.create_default_context(cafile=certificate)
            with aryk.Client(url, username="test", password=PASSWORD, tls=trust) as client:
                self.assertIn("version", client.spdk_get_version())
            awaited = aryk.AsyncClient(url, username="test", password=PASSWORD, tls=trust)
            self.assertIn("version", asyncio.run(awaited.spdk_get_version()))
            with self.assertRaises(aryk.ConnectionLost):
                aryk.Client(url, username="test", password=PASSWORD).spdk_get_version()


class AwaitedClient(DaemonCase, unittest.IsolatedAsyncioTestCase):
    async def test_a_disk_from_its_making_to_its_end(self) -> None:
        async with aryk.AsyncClient(self.daemon.socket) as client:
            await client.bdev_null_create(name="d", block_size=512, num_blocks=2048)
            [disk] = await client.bdev_get_bdevs(name="d")
            self.assertEqual(disk["num_blocks"], 2048)
            await client.vhost_create_blk_controller(ctrlr="c", dev_name="d")
            [controller] = await client.vhost_get_controllers(name="c")
            self.assertEqual(controller["sessions"], [])
            await client.vhost_delete_controller(ctrlr="c")
            await client.bdev_null_delete(name="d")
            with self.assertRaises(aryk.RpcError) as raised:
                await client.bdev_null_delete(name="d")
            self.assertTrue(raised.exception.is_missing)

    async def test_tasks_share_a_connection(self) -> None:
        async with aryk.AsyncClient(self.daemon.socket) as client:
            # A waiting call does not delay other calls: their replies come first.
            waits = asyncio.ensure_future(client.bdev_get_bdevs(name="p299", timeout=10_000))
            names = [f"p{n}" for n in range(300)]
            making = [client.bdev_null_create(name=n, block_size=512, num_blocks=8) for n in names]
            self.assertEqual(await asyncio.gather(*making), names)
            self.assertEqual((await waits)[0]["name"], "p299")
            lists = await asyncio.gather(*(client.bdev_get_bdevs() for _ in range(10)))
            self.assertEqual([len(disks) for disks in lists], [300] * 10)
            await asyncio.gather(*(client.bdev_null_delete(name=n) for n in names))

    async def test_calls_are_cancelled_and_time_out(self) -> None:
        async with aryk.AsyncClient(self.daemon.socket) as client:
            waits = asyncio.ensure_future(client.bdev_get_bdevs(name="never", timeout=300))
            await client.spdk_get_version()
            waits.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waits
            client.timeout = 0.1
            with self.assertRaises(aryk.TimedOut):
                await client.bdev_get_bdevs(name="never", timeout=300)
            client.timeout = PATIENCE
            # The late replies arrive here, and no call waits for them.
            with self.assertRaises(aryk.RpcError):
                await client.bdev_get_bdevs(name="never", timeout=400)
        with stubborn_server() as path:
            async with aryk.AsyncClient(path, timeout=0.1) as client:
                with self.assertRaises(aryk.TimedOut):
                    await client.spdk_get_version()

    async def test_who_waits_is_told_that_the_daemon_is_gone(self) -> None:
        async with aryk.AsyncClient(self.daemon.socket) as client:
            await client.spdk_get_version()
            waits = [client.bdev_get_bdevs(name="never", timeout=60_000) for _ in range(3)]
            asked = asyncio.gather(*waits, return_exceptions=True)
            await client.spdk_get_version()
            self.daemon.process.kill()
            self.daemon.process.wait()
            told = await asyncio.wait_for(asked, PATIENCE)
            self.assertEqual([type(error) for error in told], [aryk.ConnectionLost] * 3)
            with self.assertRaises(aryk.ConnectionLost):
                await client.spdk_get_version()
            self.daemon.start()
            self.assertIn("version", await client.spdk_get_version())

    async def test_http(self) -> None:
        async with aryk.AsyncClient(self.daemon.url, username="test", password=PASSWORD) as client:
            versions = await asyncio.gather(*(client.spdk_get_version() for _ in range(8)))
            self.assertEqual(len(versions), 8)
        async with aryk.AsyncClient(self.daemon.url) as client:
            with self.assertRaises(aryk.HttpError):
                await client.spdk_get_version()


class Wire(unittest.TestCase):
    def test_values_are_found_however_they_are_cut(self) -> None:
        values = [{"a": ["}", '"', "\\", {"b": '\\"{['}]}, [], {"é": None}, {}]
        stream = b'{"a":["}","\\"","\\\\",{"b":"\\\\\\"{["}]}[] \n{"\xc3\xa9":null}\t{}'
        for size in range(1, len(stream) + 1):
            splitter, found = Splitter(), []
            for at in range(0, len(stream), size):
                found += splitter.push(stream[at : at + size])
            self.assertEqual(found, values, size)

    def test_what_is_no_json_ends_the_connection(self) -> None:
        with self.assertRaises(aryk.ConnectionLost):
            Splitter().push(b"{nonsense}")


if __name__ == "__main__":
    unittest.main()
