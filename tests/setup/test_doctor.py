"""``fathom doctor`` tells what is there and what is broken."""

import json

import pytest

from fathom.cli import main as command


def doctor(capsys) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit code, findings by name, and what stderr said."""
    try:
        command.main(["doctor", "--json"])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    output = capsys.readouterr()
    return code, {finding["name"]: finding for finding in json.loads(output.out)}, output.err


def test_a_sound_machine(capsys, s3_server, local_stack, monkeypatch):
    monkeypatch.setenv("FATHOM_HOME", local_stack["home"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", local_stack["mlflow_uri"])
    code, findings, _ = doctor(capsys)
    assert code == 0
    for name in ("python", "torch", "device", "stack ray", "stack mlflow", "mlflow", "s3"):
        assert findings[name]["status"] == "ok", findings[name]


def test_broken_services_are_named_with_a_remedy(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FATHOM_CACHE", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, findings, errors = doctor(capsys)
    assert code == 2
    assert findings["s3"]["status"] == "fail"
    assert findings["mlflow"]["status"] == "warn", "training goes on without a tracking server"
    assert all(finding["remedy"] for finding in findings.values() if finding["status"] != "ok")
    assert errors.startswith("error: not ready: s3")


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr("fathom.cli.doctor.PACKAGES", ("torch", "no-such-package"))
    code, findings, _ = doctor(capsys)
    assert code == 2
    assert findings["no-such-package"]["status"] == "fail"


@pytest.mark.parametrize(("free", "status"), [(1e9, "warn"), (1e12, "ok")])
def test_little_space_is_a_warning(monkeypatch, free, status):
    from fathom.cli import doctor as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})())
    (finding,) = module.disk()
    assert finding.status == status
    assert bool(finding.remedy) == (status == "warn")
