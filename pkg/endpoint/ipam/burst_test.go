package ipam

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// joinStore works at the store beside others until the test ends.
func joinStore(t *testing.T, s *Store) {
	t.Helper()
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(s.dir, lockName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
}

// ended is a context in which nobody waits.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// However slow one is, the others do not wait for it, and no two get the same address.
func TestPodsThatComeAtOnceDoNotWait(t *testing.T) {
	const pods = 100
	s, _, dir := newStore(t, time.Minute)
	joinStore(t, s)
	conf := parse(t, `{"name":"n","ipam":{"ranges":[[{"subnet":"10.9.0.0/24"}],[{"subnet":"fd00::/120"}]]}}`, "")
	var all sync.WaitGroup
	for i := range pods {
		all.Go(func() {
			if _, err := s.Allocate(ended(), owner(i), conf); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if used := usedBy(t, dir); len(used) != 2*pods {
		t.Errorf("%d addresses for %d pods of two families", len(used), pods)
	}
	for i := range pods {
		all.Go(func() {
			if freed, err := s.Release(ended(), owner(i)); err != nil || len(freed) != 2 {
				t.Errorf("freed %v, %v", freed, err)
			}
		})
	}
	all.Wait()
	if used := usedBy(t, dir); len(used) != 0 {
		t.Errorf("left in use: %v", used)
	}
	assertLabels(t, s, 0)
}

func usedBy(t *testing.T, dir string) map[netip.Addr]Owner {
	t.Helper()
	list, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	used := map[netip.Addr]Owner{}
	for _, e := range list {
		if e.State == Used {
			used[e.Address] = e.Owner
		}
	}
	return used
}

func assertLabels(t *testing.T, s *Store, want int) {
	t.Helper()
	labels, err := filepath.Glob(filepath.Join(s.dir, labelPrefix+"*"))
	if err != nil || len(labels) != want {
		t.Errorf("labels %v, %v, want %d", labels, err, want)
	}
}

// More pods than addresses come at once: as many as there are addresses get one, also that of a file without an owner,
// which only one who is alone may remove.
func TestLastAddressesInABurst(t *testing.T) {
	const pods, addresses = 12, 5 // .2 to .6
	s, _, dir := newStore(t, 0)
	take(t, s, owner(0), "IP=10.9.0.6")
	release(t, s, owner(0))
	if err := os.WriteFile(filepath.Join(s.dir, "10.9.0.4"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	conf := parse(t, small, "")
	got := make(chan error, pods)
	var begin sync.WaitGroup
	begin.Add(1)
	for i := range pods {
		go func() {
			begin.Wait()
			_, err := s.Allocate(t.Context(), owner(i), conf)
			got <- err
		}()
	}
	begin.Done()
	served := 0
	for range pods {
		if err := <-got; err == nil {
			served++
		} else if !errors.Is(err, ErrExhausted) {
			t.Error(err)
		}
	}
	if used := usedBy(t, dir); served != addresses || len(used) != addresses {
		t.Errorf("%d served, in use %v, want %d", served, used, addresses)
	}
	assertLabels(t, s, addresses)
}

// What looks like the remains of a killed process is beside others perhaps the work of one of them.
func TestNobodyCleansUpBesideOthers(t *testing.T) {
	s, _, _ := newStore(t, 0)
	joinStore(t, s)
	for _, name := range []string{"10.9.0.2", owner(7).newLabel()} {
		if err := os.WriteFile(filepath.Join(s.dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if a := take(t, s, owner(1), ""); a != "10.9.0.3" {
		t.Errorf("took %s, want the first that looks free", a)
	}
	for _, name := range []string{"10.9.0.2", owner(7).newLabel()} {
		if _, err := os.Stat(filepath.Join(s.dir, name)); err != nil {
			t.Error(err)
		}
	}
}

// An address that was taken and freed after the store was read is in quarantine all the same.
func TestFreedAfterTheStoreWasRead(t *testing.T) {
	s, _, _ := newStore(t, time.Minute)
	a := netip.MustParseAddr(take(t, s, owner(1), ""))
	release(t, s, owner(1))
	r := &reserver{store: s} // which knows of none
	e := Entry{Owner: owner(2), Address: a}
	if ok, err := r.claim(e); ok || err != nil {
		t.Errorf("claimed %v, %v, want an address that is not free", ok, err)
	}
	if _, err := os.Stat(s.path(a)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the address's file: %v, want none", err)
	}
	r.force = a
	if ok, err := r.claim(e); !ok || err != nil {
		t.Errorf("claimed %v, %v although it was asked for", ok, err)
	}
}

// Killed at any step of taking an address, an owner leaves what its DEL and its next ADD can handle.
func TestKilledWhileTaking(t *testing.T) {
	const address = "10.9.0.2"
	content := strings.Join([]string{owner(1).ContainerID, owner(1).IfName}, "\r\n")
	for name, linked := range map[string]bool{"before the link": false, "before the label": true} {
		t.Run(name, func(t *testing.T) {
			s, _, dir := newStore(t, 0)
			take(t, s, owner(2), "IP=10.9.0.5")
			label := filepath.Join(s.dir, owner(1).newLabel())
			if err := os.WriteFile(label, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			if linked {
				if err := os.Link(label, filepath.Join(s.dir, address)); err != nil {
					t.Fatal(err)
				}
			}
			freed := release(t, s, owner(1))
			if (len(freed) == 1) != linked {
				t.Errorf("freed %v", freed)
			}
			if _, err := os.Stat(label); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the new label: %v, want none", err)
			}
			if a := take(t, s, owner(1), "IP="+address); a != address {
				t.Errorf("took %s", a)
			}
			if used := usedBy(t, dir); len(used) != 2 || used[netip.MustParseAddr(address)] != owner(1) {
				t.Errorf("in use: %v", used)
			}
			assertLabels(t, s, 2)
		})
	}
}
