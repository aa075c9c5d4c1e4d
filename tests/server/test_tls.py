"""https: who trusts the certificate is answered, who does not or speaks plain http is refused; wrong files are named."""

import shutil
import ssl
import subprocess

import httpx
import openai
import pytest
from serve_process import PATIENCE, served
from server_support import Raw, request_bytes

from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.server.limits import Limits
from refimpl.server.serve_options import ServeOptions
from refimpl.server.serving import Serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on PATH, to make certificates with")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a certificate for 127.0.0.1 that signs itself, its key, the key locked, and another key."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("key.pem", "other.pem"):
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", name)
    own = ["-subj", "/CN=refimpl", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", "-x509", "-key", "key.pem", "-out", "certificate.pem", "-days", "2", *own)
    openssl("pkey", "-in", "key.pem", "-aes256", "-passout", "pass:secret", "-out", "locked.pem")
    return folder


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    flags = ("--ssl-certfile", files / "certificate.pem", "--ssl-keyfile", files / "key.pem", "--max-model-len", 128)
    with served(tmp_path_factory.mktemp("serve"), "--port", 0, *flags) as running:
        yield running


def ask(server, verify, stream=False):
    http = httpx.Client(timeout=PATIENCE, trust_env=False, verify=verify)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, seed=1, stream=stream)
        return "".join(event.choices[0].text for event in answer) if stream else answer.choices[0].text


def test_a_client_that_trusts_the_certificate_is_answered_and_another_refuses(server, files):
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=files / "certificate.pem")
    assert ask(server, trusting) == ask(server, trusting, stream=True)
    with pytest.raises(openai.APIConnectionError) as refused:
        ask(server, ssl.create_default_context())
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
    assert ask(server, trusting)


def test_plain_http_fails_and_harms_nothing(server, files):
    trusting = ssl.create_default_context(cafile=files / "certificate.pem")
    before = ask(server, trusting)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url.replace('https', 'http')}/health", trust_env=False, timeout=PATIENCE)
    stranger = Raw(
        httpx.URL(server.url).netloc.decode().split(":"), request_bytes("/v1/completions", b'{"prompt": "Hello"}')
    )
    assert b"HTTP" not in stranger.read_all()
    stranger.socket.close()
    silent = Raw(httpx.URL(server.url).netloc.decode().split(":"))  # no handshake at all, while the others ask
    assert ask(server, trusting) == before
    silent.vanish()
    assert ask(server, trusting) == before
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("certificate.pem", "none.pem", r"--ssl-keyfile .*none.pem cannot be read: No such file"),
        ("none.pem", "key.pem", r"--ssl-certfile .*none.pem cannot be read: No such file"),
        ("certificate.pem", ".", "cannot be read: Is a directory"),
        ("certificate.pem", "other.pem", "are no certificate and its key: key values mismatch"),
        ("certificate.pem", "certificate.pem", "are no certificate and its key"),
        ("key.pem", "key.pem", "are no certificate and its key"),
        ("certificate.pem", "locked.pem", "is locked by a pass phrase"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_a_model_is_loaded(files, certificate, key, said):
    options = ServeOptions(port=0, ssl_certfile=str(files / certificate), ssl_keyfile=str(files / key))
    with pytest.raises(ConfigError, match=said):
        Serving(options, Limits(), ("a model",)).run(EngineArgs(model="no such model"))
