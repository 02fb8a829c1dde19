from jaxrunner import driver


def test_the_driver_version_is_read_where_the_kernel_shows_it(tmp_path, monkeypatch):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Fri Jul 1 2026\nGCC version: 13.2.0\n")
    monkeypatch.setattr(driver, "FILE", file)
    assert driver.driver_version() == "580.159.04"
    monkeypatch.setattr(driver, "FILE", tmp_path / "none")
    assert driver.driver_version() is None
