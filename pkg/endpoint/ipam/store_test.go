package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// small has the addresses .2 to .6; .1 is the gateway.
const small = `{"cniVersion":"1.0.0","name":"n","ipam":{"type":"host-local","ranges":[[{"subnet":"10.9.0.0/29"}]]}}`

type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func newStore(t *testing.T, quarantine time.Duration) (*Store, *clock, string) {
	t.Helper()
	dir := t.TempDir()
	c := &clock{time.Now().Truncate(time.Second)}
	s, err := Open(dir, "n", Options{Quarantine: quarantine, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	return s, c, dir
}

func parse(t *testing.T, conf, args string) Config {
	t.Helper()
	c, err := Parse([]byte(conf), args)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func owner(i int) Owner { return Owner{fmt.Sprintf("pod%d", i), "eth0"} }

// take allocates one address and returns it as text, or the error's.
func take(t *testing.T, s *Store, o Owner, args string) string {
	t.Helper()
	got, err := s.Allocate(context.Background(), o, parse(t, small, args))
	if err != nil {
		return err.Error()
	}
	return got[0].String()
}

func release(t *testing.T, s *Store, o Owner) []netip.Addr {
	t.Helper()
	freed, err := s.Release(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	return freed
}

func TestAllocateUntilNothingIsLeft(t *testing.T) {
	s, _, _ := newStore(t, 0)
	seen := map[string]bool{}
	for i := range 5 {
		seen[take(t, s, owner(i), "")] = true
	}
	for i := 2; i <= 6; i++ {
		if a := fmt.Sprintf("10.9.0.%d", i); !seen[a] {
			t.Errorf("%s was never given: %v", a, seen)
		}
	}
	_, err := s.Allocate(context.Background(), owner(9), parse(t, small, ""))
	if !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), s.dir) {
		t.Errorf("a full range: %v, want ErrExhausted and the store's directory", err)
	}
	release(t, s, owner(3))
	if a := take(t, s, owner(9), ""); !strings.HasPrefix(a, "10.9.0.") {
		t.Errorf("after a release: %s", a)
	}
}

func TestAllocateTwiceForOneOwner(t *testing.T) {
	s, _, _ := newStore(t, 0)
	first := take(t, s, owner(1), "")
	for _, args := range []string{"", "IP=10.9.0.5", "IP=" + first} {
		_, err := s.Allocate(context.Background(), owner(1), parse(t, small, args))
		if !errors.Is(err, ErrAllocated) {
			t.Errorf("args %q: %v, want ErrAllocated", args, err)
		}
	}
	if a := take(t, s, Owner{"pod1", "eth1"}, ""); a == first {
		t.Errorf("another interface got the same address")
	}
}

func TestReleaseTakesOnlyTheOwners(t *testing.T) {
	s, _, dir := newStore(t, 0)
	a, b := take(t, s, Owner{"pod", "eth0"}, ""), take(t, s, Owner{"pod", "eth1"}, "")
	if got := release(t, s, Owner{"pod", "eth0"}); len(got) != 1 || got[0].String() != a {
		t.Errorf("freed %v, want %s", got, a)
	}
	if got := release(t, s, Owner{"pod", "eth0"}); len(got) != 0 {
		t.Errorf("a second release freed %v", got)
	}
	list, err := List(dir)
	if err != nil || len(list) != 1 || list[0].Address.String() != b {
		t.Errorf("left: %v, %v; want only %s", list, err, b)
	}
}

// Somebody removes the store between its making and its locking.
func TestAllocateInAStoreThatIsGone(t *testing.T) {
	s, _, _ := newStore(t, 0)
	got, err := s.allocate(context.Background(), owner(1), parse(t, small, ""))
	if !errors.Is(err, errNoStore) || !strings.Contains(err.Error(), s.dir) || len(got) != 0 {
		t.Errorf("got %v, error %v; want one that names the directory", got, err)
	}
}

func TestReleaseWithoutAStore(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	if got := release(t, s, owner(1)); len(got) != 0 {
		t.Errorf("freed %v", got)
	}
	if _, err := os.Stat(Dir(dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the release made a store: %v", err)
	}
}

func TestFreedAddressRests(t *testing.T) {
	s, clock, dir := newStore(t, time.Minute)
	for i := range 5 {
		take(t, s, owner(i), "")
	}
	freed := release(t, s, owner(2))[0].String() // the only free one, so it is the next in turn
	list, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(e Entry) bool { return e.Address.String() == freed })
	if i < 0 || list[i].State != Quarantined || list[i].Owner != owner(2) || !list[i].Since.Equal(clock.t) {
		t.Fatalf("list %+v, want %s quarantined since %s", list, freed, clock.t)
	}

	release(t, s, owner(3))
	clock.t = clock.t.Add(30 * time.Second)
	last := release(t, s, owner(4))[0].String()
	// Nothing but resting addresses is left: the one that has rested longest, not the one freed last.
	if a := take(t, s, owner(10), ""); a == last {
		t.Errorf("took %s, which was freed last", a)
	}
}

func TestLongestRestedIsTakenWhenNothingElseIsLeft(t *testing.T) {
	s, clock, _ := newStore(t, time.Minute)
	for i := range 5 {
		take(t, s, owner(i), "")
	}
	var order []string
	for _, i := range []int{3, 0, 4} {
		order = append(order, release(t, s, owner(i))[0].String())
		clock.t = clock.t.Add(time.Second)
	}
	for i, want := range order {
		if a := take(t, s, owner(20+i), ""); a != want {
			t.Errorf("allocation %d: %s, want %s (freed in the order %v)", i, a, want, order)
		}
	}
	if a := take(t, s, owner(30), ""); !strings.Contains(a, ErrExhausted.Error()) {
		t.Errorf("all used: %s", a)
	}
}

func TestQuarantineEnds(t *testing.T) {
	s, clock, dir := newStore(t, time.Minute)
	for i := range 5 {
		take(t, s, owner(i), "")
	}
	old := release(t, s, owner(1))[0].String()
	clock.t = clock.t.Add(50 * time.Second)
	release(t, s, owner(3))
	clock.t = clock.t.Add(10 * time.Second)
	if a := take(t, s, owner(7), ""); a != old {
		t.Errorf("took %s, want %s whose minute is over", a, old)
	}
	release(t, s, owner(4))
	clock.t = clock.t.Add(-time.Hour) // the clock was set back: resting must not last an hour
	take(t, s, owner(8), "")
	list, err := List(dir)
	if err != nil || slices.ContainsFunc(list, func(e Entry) bool { return e.State == Quarantined }) {
		t.Errorf("list %v, %v; want nothing resting", list, err)
	}
}

func TestRequestedAddressIsGivenAtOnce(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	if a := take(t, s, owner(1), "IgnoreUnknown=1;IP=10.9.0.5;K8S_POD_NAME=x"); a != "10.9.0.5" {
		t.Fatalf("got %s", a)
	}
	if a := take(t, s, owner(2), "IP=10.9.0.5"); !strings.Contains(a, ErrExhausted.Error()) {
		t.Errorf("a taken address: %s", a)
	}
	release(t, s, owner(1))
	if a := take(t, s, owner(2), "IP=10.9.0.5"); a != "10.9.0.5" {
		t.Errorf("a resting address that is asked for: %s", a)
	}
	list, err := List(dir)
	if err != nil || len(list) != 1 || list[0].State != Used {
		t.Errorf("list %v, %v; want one used address and no resting one", list, err)
	}
}

func TestDualStackIsAllOrNone(t *testing.T) {
	s, _, dir := newStore(t, 0)
	conf := `{"name":"n","ipam":{"ranges":[[{"subnet":"fd00::/64"}],[{"subnet":"10.9.0.0/30"}]]}}`
	got, err := s.Allocate(context.Background(), owner(1), parse(t, conf, ""))
	if err != nil {
		t.Fatal(err)
	}
	want := []netip.Addr{netip.MustParseAddr("fd00::2"), netip.MustParseAddr("10.9.0.2")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err = s.Allocate(context.Background(), owner(2), parse(t, conf, "")); !errors.Is(err, ErrExhausted) {
		t.Errorf("IPv4 is exhausted: %v", err)
	}
	list, err := List(dir)
	if err != nil || len(list) != 2 || list[0].Owner != owner(1) || list[1].Owner != owner(1) {
		t.Errorf("the failed allocation left something: %v, %v", list, err)
	}
	if freed := release(t, s, owner(1)); len(freed) != 2 {
		t.Errorf("freed %v, want both", freed)
	}
}

func TestEmptyFileOfAKillIsTakenAway(t *testing.T) {
	for name, use := range map[string]func(*testing.T, *Store){
		"by an allocation": func(t *testing.T, s *Store) { take(t, s, owner(1), "IP=10.9.0.3") },
		"by a release":     func(t *testing.T, s *Store) { release(t, s, owner(1)) },
		"by GC": func(t *testing.T, s *Store) {
			if _, err := s.ReleaseExcept(context.Background(), nil); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, dir := newStore(t, 0)
			take(t, s, owner(0), "IP=10.9.0.2")
			for _, leftover := range []string{"10.9.0.3", "10.9.0.4"} {
				if err := os.WriteFile(filepath.Join(s.dir, leftover), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			use(t, s)
			list, err := List(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range list {
				if e.State == Garbage {
					t.Errorf("left: %+v", e)
				}
			}
		})
	}
}

// A kill between giving a resting address on and removing its resting file.
func TestAddressBothUsedAndResting(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	take(t, s, owner(1), "IP=10.9.0.3")
	release(t, s, owner(1))
	if err := os.WriteFile(s.path(netip.MustParseAddr("10.9.0.3")), []byte("pod2\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	take(t, s, owner(3), "IP=10.9.0.4")
	list, err := List(dir)
	if err != nil || len(list) != 2 || list[0].Owner != owner(2) || list[0].State != Used {
		t.Errorf("list %v, %v; want 10.9.0.3 used by pod2 once", list, err)
	}
}

func TestReleaseExcept(t *testing.T) {
	s, _, dir := newStore(t, 0)
	for i := range 4 {
		take(t, s, owner(i), "")
	}
	freed, err := s.ReleaseExcept(context.Background(), map[Owner]bool{owner(1): true, owner(9): true})
	if err != nil || len(freed) != 3 {
		t.Errorf("freed %v, %v", freed, err)
	}
	if list, err := List(dir); err != nil || len(list) != 1 || list[0].Owner != owner(1) {
		t.Errorf("left %v, %v", list, err)
	}
}

func TestWaitingForTheLockIsBounded(t *testing.T) {
	s, _, _ := newStore(t, 0)
	take(t, s, owner(1), "")
	l, err := bpffs.File(context.Background(), filepath.Join(s.dir, lockName)) // by one that hangs
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := s.Allocate(ctx, owner(2), parse(t, small, "")); !errors.Is(err, bpffs.ErrLocked) {
		t.Errorf("allocate: %v, want ErrLocked", err)
	}
	if _, err := s.Release(ctx, owner(1)); !errors.Is(err, bpffs.ErrLocked) {
		t.Errorf("release: %v, want ErrLocked", err)
	}
}

func TestConcurrentAllocationsDiffer(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	conf := parse(t, `{"name":"n","ipam":{"subnet":"10.9.0.0/24"}}`, "")
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			for range 3 {
				if _, err := s.Allocate(context.Background(), owner(i), conf); err != nil {
					t.Error(err)
				}
				if _, err := s.Release(context.Background(), owner(i)); err != nil {
					t.Error(err)
				}
			}
			if _, err := s.Allocate(context.Background(), owner(i), conf); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	list, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	owners := map[Owner]bool{}
	for _, e := range list {
		if e.State == Used {
			owners[e.Owner] = true
		}
	}
	if len(owners) != 40 {
		t.Errorf("%d owners have an address, want 40", len(owners))
	}
}

func TestOpenRefusesHostileNames(t *testing.T) {
	for _, name := range []string{"", "..", "../x", "a/b", ".hidden", "a\x00b", strings.Repeat("a", 201)} {
		if _, err := Open(t.TempDir(), name, Options{}); err == nil {
			t.Errorf("network name %q was accepted", name)
		}
	}
}

func TestListOfNothing(t *testing.T) {
	if list, err := List(filepath.Join(t.TempDir(), "none")); err != nil || len(list) != 0 {
		t.Errorf("got %v, %v", list, err)
	}
}

// An ADD that fails early discards the address that it has asked for: the earlier pod's packets may still be on their way.
func TestDiscardedAddressGoesOnResting(t *testing.T) {
	s, clock, dir := newStore(t, time.Minute)
	take(t, s, owner(1), "IP=10.9.0.3")
	release(t, s, owner(1))
	freed := clock.t
	clock.t = clock.t.Add(10 * time.Second)
	if a := take(t, s, owner(2), "IP=10.9.0.3"); a != "10.9.0.3" {
		t.Fatalf("got %s", a)
	}
	if _, err := s.Discard(context.Background(), owner(2)); err != nil {
		t.Fatal(err)
	}
	list, err := List(dir)
	if err != nil || len(list) != 1 || list[0].State != Quarantined || list[0].Owner != owner(1) || !list[0].Since.Equal(freed) {
		t.Errorf("list %+v, %v; want 10.9.0.3 resting since %s", list, err, freed)
	}
	for i := range 4 {
		if a := take(t, s, owner(10+i), ""); a == "10.9.0.3" {
			t.Errorf("the resting address was given to the next pod")
		}
	}
}

// Dual stack: the address of the first family goes on resting when there is none of the second.
func TestAllocationThatFailsLeavesTheRestingAddress(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	conf := `{"name":"n","ipam":{"ranges":[[{"subnet":"10.9.0.0/29"}],[{"subnet":"fd00::/126","rangeStart":"fd00::2","rangeEnd":"fd00::2"}]]}}`
	allocate := func(o Owner, args string) error {
		_, err := s.Allocate(context.Background(), o, parse(t, conf, args))
		return err
	}
	if err := allocate(owner(1), "IP=10.9.0.3"); err != nil {
		t.Fatal(err)
	}
	release(t, s, owner(1))
	if err := allocate(owner(2), "IP=10.9.0.4"); err != nil { // has the only one of the second family
		t.Fatal(err)
	}
	if err := allocate(owner(3), "IP=10.9.0.3"); !errors.Is(err, ErrExhausted) {
		t.Fatalf("no address of the second family is left: %v", err)
	}
	list, err := List(dir)
	resting := slices.IndexFunc(list, func(e Entry) bool { return e.Address.String() == "10.9.0.3" })
	if err != nil || resting < 0 || list[resting].State != Quarantined {
		t.Errorf("list %+v, %v; want 10.9.0.3 resting", list, err)
	}
}

// TestWorkOnOnePodReadsNoOtherPodsFile: that of another pod is empty here, which whoever reads it would take for garbage.
func TestWorkOnOnePodReadsNoOtherPodsFile(t *testing.T) {
	s, _, dir := newStore(t, time.Minute)
	other := netip.MustParseAddr(take(t, s, owner(1), ""))
	if err := os.Truncate(s.path(other), 0); err != nil {
		t.Fatal(err)
	}
	take(t, s, owner(2), "")
	if owned, err := s.Owned(owner(2)); err != nil || len(owned) != 1 {
		t.Errorf("owned %v, %v", owned, err)
	}
	if freed := release(t, s, owner(2)); len(freed) != 1 {
		t.Errorf("freed %v", freed)
	}
	if _, err := os.Stat(s.path(other)); err != nil {
		t.Errorf("the other pod's file was read: %v", err)
	}
	if _, err := s.ReleaseExcept(context.Background(), map[Owner]bool{owner(1): true}); err != nil {
		t.Fatal(err)
	}
	if list, err := List(dir); err != nil || slices.ContainsFunc(list, func(e Entry) bool { return e.Address == other }) {
		t.Errorf("GC reads all files: left %v, %v", list, err)
	}
}

// An earlier build knows no labels: it makes files without, and leaves those of files that it removes.
func TestStoreOfAnEarlierBuild(t *testing.T) {
	s, _, dir := newStore(t, 0)
	a := netip.MustParseAddr(take(t, s, owner(1), ""))
	if err := os.Remove(s.path(a)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.path(a), []byte("pod2\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	if owned, err := s.Owned(owner(1)); err != nil || len(owned) != 0 {
		t.Errorf("by an old label pod1 has %v, %v", owned, err)
	}
	if _, err := s.Allocate(context.Background(), owner(2), parse(t, small, "")); !errors.Is(err, ErrAllocated) {
		t.Errorf("pod2 has an address: %v, want ErrAllocated", err)
	}
	if freed := release(t, s, owner(2)); len(freed) != 1 || freed[0] != a {
		t.Errorf("freed %v, want %s", freed, a)
	}
	files, err := os.ReadDir(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasPrefix(f.Name(), labelPrefix) {
			t.Errorf("left: %s", f.Name())
		}
	}
	if list, err := List(dir); err != nil || len(list) != 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}
