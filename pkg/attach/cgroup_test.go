package attach

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// passing loads a program for a hook of sockets that lets everything pass.
func passing(t *testing.T, hook Hook) (*ebpf.Program, ebpf.ProgramID) {
	t.Helper()
	kind := ebpf.CGroupSockAddr
	if hook == SockRelease {
		kind = ebpf.CGroupSock
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "test", Type: kind, AttachType: socketTypes[hook], License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatalf("%s: %v", hook, err)
	}
	t.Cleanup(func() { _ = p.Close() })
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return p, id
}

// TestSockets attaches to every hook, replaces in place, follows the cgroup, and detaches.
func TestSockets(t *testing.T) {
	dir := bpffs.Dir(filepath.Join(priv.Isolate(t), "pins"))
	if err := dir.Prepare(); err != nil {
		t.Fatal(err)
	}
	first, second := priv.Cgroup(t), priv.Cgroup(t)
	for _, hook := range SocketHooks() {
		a := Attacher{Dir: dir, Cgroup: first}
		is := func(a Attacher, mode Mode, id ebpf.ProgramID) {
			t.Helper()
			if got, err := a.Attached(0, hook); err != nil || got != (State{mode, id}) {
				t.Errorf("%s: %+v, %v; want %v %d", hook, got, err, mode, id)
			}
		}
		put := func(a Attacher, p *ebpf.Program) {
			t.Helper()
			if qdisc, err := a.Attach(0, hook, p); qdisc || err != nil {
				t.Errorf("%s: %v, %v", hook, qdisc, err)
			}
		}
		old, oldID := passing(t, hook)
		next, nextID := passing(t, hook)
		is(a, "", 0)
		put(a, old)
		is(a, Cgroup, oldID)
		link, err := readLink(dir.Link(string(hook), 0))
		if err != nil {
			t.Fatal(err)
		}
		put(a, next)
		is(a, Cgroup, nextID)
		if now, err := readLink(dir.Link(string(hook), 0)); err != nil || now.id != link.id {
			t.Errorf("%s: link %d became %d; %v", hook, link.id, now.id, err)
		}
		// An agent that is given another cgroup does not take the old one's link for its own.
		b := Attacher{Dir: dir, Cgroup: second}
		is(b, "", 0)
		put(b, old)
		is(b, Cgroup, oldID)
		is(a, "", 0)
		is(Attacher{Dir: dir}, Cgroup, oldID) // who asks for none sees any
		if err := a.Detach(0, hook); err != nil {
			t.Errorf("%s: %v", hook, err)
		}
		is(b, Cgroup, oldID)
		// What can't be attached leaves the other where it is.
		if _, err := (Attacher{Dir: dir, Cgroup: t.TempDir()}).Attach(0, hook, next); err == nil {
			t.Errorf("%s: attached to what is no cgroup", hook)
		}
		is(b, Cgroup, oldID)
		for range 2 {
			if err := b.Detach(0, hook); err != nil {
				t.Errorf("%s: %v", hook, err)
			}
			is(b, "", 0)
		}
	}
	if left, err := os.ReadDir(dir.Links()); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// TestSocketsOfACgroupThatIsGone are attached to the one that is there now.
func TestSocketsOfACgroupThatIsGone(t *testing.T) {
	dir := bpffs.Dir(filepath.Join(priv.Isolate(t), "pins"))
	if err := dir.Prepare(); err != nil {
		t.Fatal(err)
	}
	gone := filepath.Join(priv.Cgroup(t), "gone")
	a := Attacher{Dir: dir, Cgroup: gone}
	p, id := passing(t, Connect4)
	for range 2 {
		if err := os.Mkdir(gone, 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Attach(0, Connect4, p); err != nil {
			t.Error(err)
		}
		if got, err := a.Attached(0, Connect4); err != nil || got != (State{Cgroup, id}) {
			t.Errorf("%+v, %v", got, err)
		}
		if err := priv.RemoveCgroup(gone); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.Attach(0, Connect4, p); err == nil {
		t.Error("attached to what is not there")
	}
}
