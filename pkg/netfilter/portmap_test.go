package netfilter

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// portmapRules are those of pods, each "network container", as portmap writes them.
func portmapRules(pods ...string) string {
	var chains, entries, rules strings.Builder
	for i, pod := range pods {
		network, container, _ := strings.Cut(pod, " ")
		chain := portmapChains(network, container)[0]
		fmt.Fprintf(&chains, ":%s - [0:0]\n", chain)
		fmt.Fprintf(&entries, "[%d:60] -A CNI-HOSTPORT-DNAT -p tcp -m comment --comment \"dnat name: \\\"%s\\\" id: \\\"%s\\\"\" -m multiport --dports %d -j %s\n", 30+i, network, container, 8000+i, chain)
		fmt.Fprintf(&rules, "[%d:60] -A %s -s 127.0.0.1/32 -p tcp -m tcp --dport %d -j CNI-HOSTPORT-SETMARK\n", 50+i, chain, 8000+i)
		fmt.Fprintf(&rules, "[%d:60] -A %s -p tcp -m tcp --dport %d -j DNAT --to-destination 10.244.1.%d:80\n", 70+i, chain, 8000+i, 5+i)
	}
	shared := ""
	if len(pods) > 0 {
		shared = `:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
[11:60] -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
[12:60] -A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
[13:60] -A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
[14:60] -A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
[15:60] -A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
`
	}
	return `*nat
:PREROUTING ACCEPT [1:60]
:INPUT ACCEPT [2:60]
:OUTPUT ACCEPT [3:60]
:POSTROUTING ACCEPT [4:60]
:OTHERS - [0:0]
` + chains.String() + shared + entries.String() + rules.String() + `[16:60] -A PREROUTING -j OTHERS
[17:60] -A POSTROUTING -o docker0 -j OTHERS
[18:60] -A OTHERS -i docker0 -j RETURN
COMMIT
`
}

// saved are the rules of the nat table, in the order of their chains' names, with what they have counted.
func saved(t *testing.T, variant string) string {
	t.Helper()
	out, err := exec.Command("iptables-"+variant+"-save", "-c", "-t", "nat").Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.DeleteFunc(strings.Split(string(out), "\n"), func(line string) bool { return strings.HasPrefix(line, "#") })
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
	return strings.Join(lines, "\n")
}

// chainOf is the chain of a line of iptables-save.
func chainOf(line string) string {
	words := strings.Fields(line)
	switch i := slices.Index(words, "-A"); {
	case i >= 0:
		return words[i+1]
	case strings.HasPrefix(line, ":"):
		return words[0][1:]
	}
	return ""
}

// portmapOf is a sweep of a network whose containers those are that live.
func portmapOf(t *testing.T, network string, living ...string) *Portmap {
	p := &Portmap{Network: network, Living: func() (map[string]bool, error) { return setOf(living), nil }, Lock: filepath.Join(t.TempDir(), "lock")}
	t.Cleanup(p.Close)
	return p
}

// After a sweep rules are, counters included, as if those of the pods that are gone had never been written.
func TestPortmapIsSwept(t *testing.T) {
	for _, tt := range []struct {
		name          string
		before, after []string // pods
		swept         []string
	}{
		{"nothing of portmap's", nil, nil, nil},
		{"all live", []string{"net a", "net b"}, []string{"net a", "net b"}, nil},
		{"others' pods", []string{"other x", "net2 y"}, []string{"other x", "net2 y"}, nil},
		{"the last one", []string{"net x"}, nil, []string{"x"}},
		{"the first of three", []string{"net x", "net a", "other x"}, []string{"net a", "other x"}, []string{"x"}},
		{"one in the middle", []string{"net a", "net x", "other x"}, []string{"net a", "other x"}, []string{"x"}},
		{"two, and another's stays", []string{"net x", "other x", "net y"}, []string{"other x"}, []string{"x", "y"}},
	} {
		for _, variant := range []string{"nft", "legacy"} {
			t.Run(tt.name+" by "+variant, func(t *testing.T) {
				priv.Isolate(t)
				restore := []string{"iptables-" + variant + "-restore", "-c"}
				// What is counted, and ports, tell which pod is which.
				all := portmapRules(tt.before...)
				write(t, all, restore...)
				before := saved(t, variant)
				p := portmapOf(t, "net", "a", "b")
				swept, err := p.Sweep(time.Now())
				if err != nil || !slices.Equal(swept, tt.swept) {
					t.Errorf("swept %v, error %v, want %v", swept, err, tt.swept)
				}
				after := saved(t, variant)
				if swept, err := p.Sweep(time.Now()); err != nil || swept != nil || saved(t, variant) != after {
					t.Errorf("a second sweep: %v, error %v", swept, err)
				}
				if want := withoutPods(before, tt.before, tt.after); after != want {
					t.Errorf("left:\n%s\nwant\n%s", after, want)
				}
			})
		}
	}
}

// withoutPods is what iptables-save says once only the pods of after are left of those of before.
func withoutPods(rules string, before, after []string) string {
	goes := []string{}
	for _, pod := range before {
		if !slices.Contains(after, pod) {
			network, container, _ := strings.Cut(pod, " ")
			goes = append(goes, portmapChains(network, container)[0])
		}
	}
	if len(after) == 0 {
		goes = append(goes, "CNI-HOSTPORT-")
	}
	lines := slices.DeleteFunc(strings.Split(rules, "\n"), func(line string) bool {
		return slices.ContainsFunc(goes, func(name string) bool { return strings.Contains(line, name) })
	})
	return strings.Join(lines, "\n")
}

// When the last pod is gone nothing translates; what others' rules need stays, and is said.
func TestPortmapIsInUse(t *testing.T) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			write(t, portmapRules("net x"), "iptables-"+variant+"-restore")
			run(t, "iptables-"+variant+" -t nat -A OTHERS -p sctp -j CNI-HOSTPORT-SETMARK")
			p := portmapOf(t, "net")
			if swept, err := p.Sweep(time.Now()); err == nil || len(swept) != 1 {
				t.Errorf("swept %v, error %v", swept, err)
			}
			if rules := saved(t, variant); strings.Contains(rules, "CNI-DN") || !strings.Contains(rules, "-j CNI-HOSTPORT-SETMARK") {
				t.Errorf("left:\n%s", rules)
			}
			run(t, "iptables-"+variant+" -t nat -F OTHERS")
			if swept, err := p.Sweep(time.Now()); err != nil || swept != nil {
				t.Errorf("swept %v, error %v", swept, err)
			}
			expect(t, around, Nothing, "")
		})
	}
}

// Nobody's rules go while it is not known who lives, or while another iptables writes.
func TestPortmapIsLeftAlone(t *testing.T) {
	priv.Isolate(t)
	write(t, portmapRules("net x"), "iptables-legacy-restore", "-c")
	before := saved(t, "legacy")
	unreadable := errors.New("unreadable")
	p := portmapOf(t, "net")
	living := p.Living
	p.Living = func() (map[string]bool, error) { return nil, unreadable }
	if _, err := p.Sweep(time.Now()); !errors.Is(err, unreadable) {
		t.Errorf("nobody knows who lives: %v", err)
	}
	p.Living = living
	f, err := os.Create(p.Lock)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Sweep(time.Now()); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the table is locked: %v", err)
	}
	free := p.Lock
	p.Lock = filepath.Join(t.TempDir(), "none", "lock")
	if _, err := p.Sweep(time.Now()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the lock can't be made: %v", err)
	}
	if after := saved(t, "legacy"); after != before {
		t.Errorf("left:\n%s\nwant\n%s", after, before)
	}
	p.Lock = free
	_ = f.Close()
	if swept, err := p.Sweep(time.Now()); err != nil || len(swept) != 1 {
		t.Errorf("swept %v, error %v", swept, err)
	}
}

// A look makes no table of the older iptables.
func TestPortmapMakesNoTable(t *testing.T) {
	priv.Isolate(t)
	if swept, err := portmapOf(t, "net").Sweep(time.Now()); err != nil || swept != nil {
		t.Errorf("swept %v, error %v", swept, err)
	}
	for _, names := range []string{"ip_tables_names", "ip6_tables_names"} {
		if content, _ := os.ReadFile("/proc/thread-self/net/" + names); len(content) > 0 {
			t.Errorf("%s: %q", names, content)
		}
	}
}

// What others write meanwhile is not lost, in either form.
func TestPortmapIsSweptAmongWriters(t *testing.T) {
	const written = 60
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			write(t, portmapRules(), "iptables-"+variant+"-restore")
			p := portmapOf(t, "net", "a")
			p.Lock = ""
			other := exec.Command("sh", "-c", fmt.Sprintf("for i in $(seq %d); do iptables-%s -w -t nat -A OTHERS -d 10.0.0.$i -j RETURN || exit 1; done", written, variant))
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- other.Wait() }()
			swept := 0
			for end := false; !end; {
				select {
				case err := <-ended:
					if end = true; err != nil {
						t.Errorf("the other writer: %v", err)
					}
				default:
				}
				// Without the line that would empty the chain.
				write(t, of(portmapRules("net x", "net a"), ":OTHERS - [0:0]\n", ""), "iptables-"+variant+"-restore", "-n", "-w")
				gone, err := p.Sweep(time.Now())
				if err != nil && !errors.Is(err, errChanged) {
					t.Errorf("sweep: %v", err)
				}
				swept += len(gone)
			}
			if rules := saved(t, variant); strings.Count(rules, "-d 10.0.0.") != written || swept == 0 {
				t.Errorf("swept %d times; %d of %d rules are left", swept, strings.Count(rules, "-d 10.0.0."), written)
			}
		})
	}
}

// What was decided by rules that have changed since is not carried out.
func TestOldDecisionIsRefused(t *testing.T) {
	priv.Isolate(t)
	for _, variant := range []string{"nft", "legacy"} {
		write(t, portmapRules("net x"), "iptables-"+variant+"-restore")
	}
	var q questions
	defer q.close()
	newer := &nftTable{questions: &q, family: unix.NFPROTO_IPV4, name: natTable}
	older := &legacyTable{iptables: iptables{family: unix.AF_INET}, table: natTable}
	defer older.close()
	for variant, table := range map[string]editable{"nft": newer, "legacy": older} {
		l, err := table.list()
		if err != nil {
			t.Fatal(err)
		}
		run(t, "iptables-"+variant+" -t nat -A OTHERS -j RETURN")
		before := saved(t, variant)
		if err := table.apply(l.without(l.there(portmapShared[1:]))); !errors.Is(err, errChanged) {
			t.Errorf("%s: %v", variant, err)
		}
		if after := saved(t, variant); after != before {
			t.Errorf("%s: left:\n%s\nwant\n%s", variant, after, before)
		}
	}
	if err := newer.drop(); !errors.Is(err, errChanged) {
		t.Errorf("drop: %v", err)
	}
}

// A large table is not read for every pod that ends, since kube-proxy changes it all the time.
func TestPortmapInALargeTableIsSweptNowAndThen(t *testing.T) {
	priv.Isolate(t)
	others := strings.Repeat("-A OTHERS -m comment --comment another -j RETURN\n", 1000)
	write(t, strings.Replace(portmapRules("net a", "net b"), "COMMIT", others+"COMMIT", 1), "iptables-legacy-restore", "-c")
	living := map[string]bool{"a": true, "b": true}
	p := portmapOf(t, "net")
	p.Living = func() (map[string]bool, error) { return living, nil }
	start := time.Now()
	for _, step := range []struct {
		after time.Duration
		ends  string
		swept []string
		late  bool
	}{
		{after: 0},
		{after: 5 * time.Second, ends: "a", late: true},
		{after: readLarge, swept: []string{"a"}},
		{after: readLarge + 5*time.Second, ends: "b", late: true},
		{after: 2 * readLarge, swept: []string{"b"}},
		{after: 3 * readLarge},
		{after: 3*readLarge + 5*time.Second}, // there was nothing of portmap's, and nobody has changed it
	} {
		delete(living, step.ends)
		if swept, err := p.Sweep(start.Add(step.after)); err != nil || !slices.Equal(swept, step.swept) || p.Late() != step.late {
			t.Errorf("after %s: swept %v, late %t, error %v", step.after, swept, p.Late(), err)
		}
	}
}
