package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	core "k8s.io/api/core/v1"
)

// ownerEnv makes this test's executable the owner of a cluster that waits to be killed.
const ownerEnv = "EBPF_CNI_TEST_OWNER"

func TestMain(m *testing.M) {
	Init()
	if os.Getenv(ownerEnv) != "" {
		fmt.Println("owner:", own())
		select {} // until somebody kills this process
	}
	if os.Getenv(onV2Env) != "" {
		if err := aloneOnV2(); err != nil {
			fmt.Println("on version 2:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// own makes machines and prints the cluster's name.
func own() error {
	c, err := claim(Options{Nodes: 1}.orDefault())
	if err != nil {
		return err
	}
	if err := c.makeMachines(context.Background()); err != nil {
		return err
	}
	fmt.Println(c.ID, c.Fabric.pid, c.Fabric.start, c.Nodes[0].pid, c.Nodes[0].start)
	return nil
}

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
		t.Fatal("needs root, and REQUIRE_PRIVILEGED=1 is set")
	}
	t.Skip("needs root")
}

// machines makes a cluster of machines that run nothing.
func machines(t *testing.T) *Cluster {
	t.Helper()
	requireRoot(t)
	c, err := claim(Options{Nodes: 2, Families: []core.IPFamily{core.IPv4Protocol, core.IPv6Protocol}}.orDefault())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if left := c.Remains(); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	if err := c.makeMachines(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

// ownCgroup is what a machine's processes find themselves in: the root, or below it where that may have none.
func ownCgroup(t *testing.T) string {
	t.Helper()
	all, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	if isUnified(all) {
		return "0::/" + processesDir + "\n"
	}
	return "memory:/\n"
}

func TestMachine(t *testing.T) {
	c := machines(t)
	node := c.Nodes[0]
	commands := map[string]string{
		"hostname":                   "node-1",
		"ls /sys/class/net":          "eth0\nlo",
		"cat /proc/1/comm":           "exe",
		"cat /proc/sys/kernel/panic": "10",
		"cat /proc/self/cgroup":      ownCgroup(t),
		"stat -f -c %T /sys/fs/bpf":  "bpf_fs",
	}
	for _, family := range c.Options.Families {
		seen := c.In(family)
		for _, addr := range []netip.Addr{seen.Nodes[1].Addr, seen.World()} {
			commands["ping -c1 -W2 -q "+addr.String()] = "1 received"
		}
	}
	for command, want := range commands {
		out, err := node.Run(t.Context(), strings.Fields(command)...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %q, error %v, want %q", command, out, err, want)
		}
	}
	if _, err := node.Dial(t.Context(), "tcp", "127.0.0.1:9"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("connect to a closed port: error %v, want it refused", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := node.Dial(ctx, "tcp", "198.51.100.1:9"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connect to nobody: error %v, want that it takes too long", err)
	}
	if out, err := node.Run(t.Context(), "false"); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("a program that fails: %q, error %v", out, err)
	}
}

// What belongs to the whole computer stays as it is whatever a machine's programs write.
func TestMachineKeepsToItself(t *testing.T) {
	c := machines(t)
	for name := range hostSysctls {
		file := "/proc/sys/" + name
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := c.Nodes[0].Run(t.Context(), "sh", "-c", "echo 7 >"+file+" && cat "+file); err != nil || out != "7\n" {
			t.Errorf("write %s: %q, error %v", file, out, err)
		}
		if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
			t.Errorf("%s was %q and is %q, error %v", file, before, after, err)
		}
	}
	if out, err := c.Nodes[0].Run(t.Context(), "sh", "-c", "echo 7 >/proc/sys/vm/swappiness"); err == nil {
		t.Errorf("vm.swappiness could be written: %q", out)
	}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if strings.HasPrefix(link.Attrs().Name, "node-") || link.Attrs().Name == "switch" {
			t.Errorf("%s is on the real machine", link.Attrs().Name)
		}
	}
}

func TestPrograms(t *testing.T) {
	c := machines(t)
	node, ctx := c.Nodes[0], t.Context()
	if err := node.Start(ctx, "sleeper", "sleep", "1000"); err != nil {
		t.Fatal(err)
	}
	if err := node.Start(ctx, "sleeper", "sleep", "1000"); err == nil {
		t.Error("a second program of the same name was started")
	}
	if pid, err := node.Running(ctx, "sleeper"); err != nil || pid <= 1 {
		t.Errorf("process %d, error %v", pid, err)
	}
	if err := node.Stop(ctx, "sleeper", syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if _, err := node.Running(ctx, "sleeper"); err == nil || !strings.Contains(err.Error(), "status 143") {
		t.Errorf("after SIGTERM: error %v, want status 143", err)
	}
	if err := node.Start(ctx, "sleeper", "sleep", "1000"); err != nil {
		t.Errorf("start it again: %v", err)
	}
	if err := node.Stop(ctx, "nobody", syscall.SIGTERM); err == nil {
		t.Error("a program that was never started was stopped")
	}
	if err := node.Start(ctx, "missing", "/no/such/program"); err == nil {
		t.Error("a program that does not exist was started")
	}
}

// A machine ends with the process that made it, also when that is killed; the next start takes the rest away.
func TestKilledOwner(t *testing.T) {
	requireRoot(t)
	owner := exec.Command("/proc/self/exe")
	owner.Env = append(os.Environ(), ownerEnv+"=1")
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	c := &Cluster{Fabric: &Machine{Name: "fabric"}, Nodes: []*Machine{{Name: "node-1"}}}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Sscan(line, &c.ID, &c.Fabric.pid, &c.Fabric.start, &c.Nodes[0].pid, &c.Nodes[0].start)
	if err != nil {
		t.Fatalf("the owner says %q: %v", line, err)
	}
	c.Dir = filepath.Join(registryDir, c.ID)
	if left := c.Remains(); len(left) < 4 {
		t.Errorf("a living cluster has only %q", left)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, m := range []*Machine{c.Fabric, c.Nodes[0]} {
		if err := Poll(ctx, m.Name+" has ended", func(context.Context) error {
			if start, err := StartTime(m.pid); err == nil && start == m.start {
				return fmt.Errorf("process %d is there", m.pid)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if err := Sweep(t.Context(), false); err != nil {
		t.Error(err)
	}
	if left := c.Remains(); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// Sweep leaves alone what has an owner.
func TestSweepLeavesTheLiving(t *testing.T) {
	c := machines(t)
	if err := Sweep(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Nodes[0].Run(t.Context(), "true"); err != nil {
		t.Error(err)
	}
}

func TestReboot(t *testing.T) {
	c := machines(t)
	node, ctx := c.Nodes[1], t.Context()
	for _, file := range []string{"/run/in-memory", "/var/lib/kubelet/on-disk"} {
		if _, err := node.Run(ctx, "touch", file); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.powerCycle(ctx, node); err != nil {
		t.Fatal(err)
	}
	if out, err := node.Run(ctx, "ls", "/run", "/var/lib/kubelet"); err != nil || !strings.Contains(out, "on-disk") || strings.Contains(out, "in-memory") {
		t.Errorf("after the reboot: %q, error %v", out, err)
	}
	if out, err := node.Run(ctx, "ping", "-c1", "-W2", c.Nodes[0].Addr.String()); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if err := c.Reboot(ctx, c.Nodes[0]); err == nil {
		t.Error("the node of the control plane was rebooted")
	}
}
