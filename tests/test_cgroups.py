"""Finding the control groups of a machine, in either version, from what /proc says."""

from sandbox import cgroups


def proc(folder, groups, mounts):
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path):
    found = cgroups.hierarchies(
        proc(
            tmp_path,
            "8:pids:/\n4:cpu,memory:/agents/one\n0::/\n",
            f"35 30 0:31 / {tmp_path}/memory rw - cgroup cgroup rw,memory,cpu\n"
            f"36 30 0:32 / {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
            f"37 30 0:33 / {tmp_path}/blkio rw - cgroup cgroup rw,blkio\n"
            f"38 30 0:34 / {tmp_path}/home rw - ext4 /dev/sda rw\n",
        )
    )
    assert {(h.folder, h.version, h.controllers) for h in found} == {
        (tmp_path / "memory/agents/one", 1, frozenset({"memory", "cpu"})),
        (tmp_path / "pids", 1, frozenset({"pids"})),
    }


def test_version_2_bounds_what_is_handed_down(tmp_path):
    # In a container the mount shows a part of the tree, and paths begin above it.
    own = tmp_path / "unified" / "inner"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("cpu memory pids\n")
    found = cgroups.hierarchies(
        proc(
            tmp_path,
            "0::/outer/inner\n",
            f"35 30 0:31 /outer {tmp_path}/unified rw - cgroup2 cgroup2 rw\n",
        )
    )
    assert [(h.folder, h.version, h.controllers) for h in found] == [
        (own, 2, frozenset({"memory", "pids", "cpu"}))
    ]


def test_a_mount_of_another_part_of_the_tree_is_of_no_use(tmp_path):
    found = cgroups.hierarchies(
        proc(
            tmp_path,
            "4:memory:/outer\n",
            f"35 30 0:31 /outer-other {tmp_path} rw - cgroup cgroup rw,memory\n",
        )
    )
    assert not found
