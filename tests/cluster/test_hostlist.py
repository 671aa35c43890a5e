"""Lists of hosts and of tasks, as SLURM writes them."""

import os
import shutil
import subprocess

import pytest

from mpidist.cluster import expand_hostlist, expand_tasks_per_node

# What scontrol of SLURM 22.05.8 prints, but for the last three, which it refuses.
HOSTS = [
    ("", []),
    ("n1", ["n1"]),
    ("n[1-2],m5", ["n1", "n2", "m5"]),
    ("n[1-2,5,7-8],m[1-2]", ["n1", "n2", "n5", "n7", "n8", "m1", "m2"]),
    ("n[001-003]", ["n001", "n002", "n003"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]),
    ("n[098-102]", ["n098", "n099", "n100", "n101", "n102"]),
    ("n[01,2,003]", ["n01", "n2", "n003"]),
    ("n[9-010]", ["n9", "n10"]),
    ("n[1-1]", ["n1"]),
    ("[1-3]", ["1", "2", "3"]),
    ("n1 n2", ["n1", "n2"]),
    ("n1,,n2", ["n1", "n2"]),
    ("n[1-2],", ["n1", "n2"]),
    (
        "rack[0-1]node[09-10]",
        ["rack0node09", "rack0node10", "rack1node09", "rack1node10"],
    ),
    ("gpu-a1.cl.org", ["gpu-a1.cl.org"]),
    ("n[1-2]-ib,l", ["n1-ib", "n2-ib", "l"]),
    ("r[0-1]-n[1,3]-ib", ["r0-n1-ib", "r0-n3-ib", "r1-n1-ib", "r1-n3-ib"]),
    ("a[1-2]x[3]y[5-6]", ["a1x3y5", "a1x3y6", "a2x3y5", "a2x3y6"]),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTS)
def test_hosts(text, hosts):
    assert expand_hostlist(text) == hosts


def test_scontrol_prints_the_same(tmp_path):
    if shutil.which("scontrol") is None:
        pytest.skip("SLURM is not installed")
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=c\nSlurmctldHost=localhost\n")
    for text, hosts in HOSTS[1:-3]:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(configuration)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split() == hosts, text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("n[1-2", r"a bracket without the other one, or in another, '\[1-2'"),
        ("n1-2]", "a bracket without the other one"),
        ("n[1,[3-4]]", "a bracket without the other one, or in another"),
        ("n[]", "'', which is neither a number nor a range"),
        ("n[,1]", "'', which is neither"),
        ("n[a-b]", "'a-b', which is neither"),
        ("n[1-2-3]", "'1-2-3', which is neither"),
        ("bp[000x133]", "'000x133', which is neither"),
        ("m,n[3-1]", "the range '3-1', which ends before it begins, in 'm,n"),
        ("n[0-99999999]", "the range '0-99999999', of more than 65536 hosts"),
    ],
)
def test_bad_lists_of_hosts(text, what):
    with pytest.raises(ValueError, match=f"expand_hostlist: expected .*, got {what}"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", []),
        ("4", [4]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("2(x4)", [2, 2, 2, 2]),
        (" 1 , 2(x1) ", [1, 2]),
        ("16(x2),8(x3)", [16, 16, 8, 8, 8]),
    ],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text", ["a", "3x2", "3(x)", "3(x2", "1,,2", "-1", "1(x99999999)", "(x2)"]
)
def test_bad_tasks_per_node(text):
    with pytest.raises(ValueError, match=r"expected counts such as .*, got"):
        expand_tasks_per_node(text)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="expand_hostlist: expected a string"):
        expand_hostlist(["n1"])
    with pytest.raises(TypeError, match="expand_tasks_per_node: expected a string"):
        expand_tasks_per_node(2)
