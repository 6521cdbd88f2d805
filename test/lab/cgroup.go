package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// cgroupPrefix begins the name of every node's cgroup.
const cgroupPrefix = "ebpf-cni-lab-"

// makeCgroup gives a node a cgroup of its own, below the machine's first one, which is not touched. A machine that has not
// mounted cgroup2 has labs all the same, without Services.
func (n *Node) makeCgroup() error {
	mount, err := priv.CgroupMount()
	if mount == "" || err != nil {
		return err
	}
	n.cgroup = filepath.Join(mount, cgroupPrefix+n.lab.ID+"-"+n.Name)
	if err := os.Mkdir(n.cgroup, 0o755); err != nil {
		return fmt.Errorf("make the cgroup of %s: %w", n.Name, err)
	}
	return nil
}

// inCgroup has a process begin in the node's cgroup. The function returned is to be called once it has.
func (n *Node) inCgroup(attr *syscall.SysProcAttr) (started func(), err error) {
	if n.cgroup == "" {
		return func() {}, nil
	}
	dir, err := os.Open(n.cgroup)
	if err != nil {
		return nil, fmt.Errorf("open the cgroup of %s: %w", n.Name, err)
	}
	attr.UseCgroupFD, attr.CgroupFD = true, int(dir.Fd())
	return func() { dir.Close() }, nil
}

// EnterCgroup has the caller's process be one of the node's until it leaves: programs on the node's cgroup see the sockets that it makes.
func (n *Node) EnterCgroup() (leave func() error, err error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find the own cgroup: %w", err)
	}
	_, before, _ := strings.Cut("\n"+string(own), "\n0::")
	before, _, _ = strings.Cut(before, "\n")
	if err := joinCgroup(os.Getpid(), n.cgroup); err != nil {
		return nil, fmt.Errorf("enter the cgroup of %s: %w", n.Name, err)
	}
	return func() error { return joinCgroup(os.Getpid(), filepath.Join(filepath.Dir(n.cgroup), before)) }, nil
}

// joinCgroup moves a process, with all of its threads.
func joinCgroup(process int, cgroup string) error {
	return os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(process)), 0)
}

// Cgroup is the directory of the cgroup of the node's processes; empty where cgroup2 is not mounted.
func (n *Node) Cgroup() string { return n.cgroup }

// cgroupVariable is what an agent of the node needs in its environment: without it, one that serves Services would take the
// machine's own cgroup. Builds that have no such flag pass over it.
func (n *Node) cgroupVariable() string { return "EBPF_AGENT_CGROUP=" + n.cgroup }

// cgroupsOf lists the cgroups of one lab.
func cgroupsOf(id string) ([]string, error) {
	mount, err := priv.CgroupMount()
	if mount == "" || err != nil {
		return nil, err
	}
	names, err := namesIn(mount, func(entry fs.DirEntry) bool { return strings.HasPrefix(entry.Name(), cgroupPrefix+id+"-") })
	for i, name := range names {
		names[i] = filepath.Join(mount, name)
	}
	return names, err
}

// removeCgroups removes the cgroups of a lab whose nodes' own processes have ended.
func removeCgroups(id string) error {
	all, err := cgroupsOf(id)
	for _, dir := range all {
		if failed := removeTree(dir); failed != nil && !errors.Is(failed, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("remove a cgroup: %w", failed))
		}
	}
	return err
}

// removeTree removes a cgroup and those below it, as containers have. Their processes, which no namespace of the lab's tells to be
// its, end with them.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		below := filepath.Join(dir, entry.Name())
		if err := os.WriteFile(filepath.Join(below, "cgroup.kill"), []byte("1"), 0); err != nil {
			return err
		}
		if err := removeTree(below); err != nil {
			return err
		}
	}
	return priv.RemoveCgroup(dir)
}
