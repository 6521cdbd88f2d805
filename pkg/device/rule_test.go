package device

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// run runs a command in the test's namespace.
func run(t *testing.T, command string) {
	t.Helper()
	words := strings.Fields(command)
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

func TestRules(t *testing.T) {
	inside(t)
	before, err := Rules()
	must(t, err)
	if diff := cmp.Diff([]Rule{{0, 255, ""}, {32766, 254, ""}, {32767, 253, ""}}, before); diff != "" {
		t.Errorf("the kernel's own rules (-want +got):\n%s", diff)
	}
	for rule, want := range map[string]string{
		"from 10.1.0.0/16":           "",
		"to 10.1.0.0/16":             "",
		"not from 10.1.0.0/16":       "",
		"iif lo":                     "",
		"oif lo":                     "",
		"ipproto tcp":                "",
		"uidrange 0-1000":            "",
		"fwmark 0x10":                "a packet mark",
		"not fwmark 0x10/0xf0":       "a packet mark",
		"tos 0x10":                   "a TOS value",
		"ipproto udp dport 53":       "a destination port",
		"ipproto tcp sport 80-90":    "a source port",
		"from 10.1.0.0/16 fwmark 16": "a packet mark",
	} {
		run(t, "ip rule add priority 100 lookup 77 "+rule)
		rules, err := Rules()
		must(t, err)
		if diff := cmp.Diff([]Rule{before[0], {100, 77, want}, before[1], before[2]}, rules); diff != "" {
			t.Errorf("%s (-want +got):\n%s", rule, diff)
		}
		run(t, "ip rule del priority 100")
	}
	if _, err := parseRule([]byte{2}); err == nil {
		t.Error("half a message is taken for a rule")
	}
	unknown := append(make([]byte, 12), 8, 0, 0x77, 0, 1, 2, 3, 4)
	if r, err := parseRule(unknown); err != nil || r.Unseen == "" {
		t.Errorf("a condition that is not known yet: %+v, %v", r, err)
	}
}

func TestTableRoutes(t *testing.T) {
	h, lo := inside(t)
	run(t, "ip link set lo up")
	run(t, "ip route add 10.5.0.0/16 dev lo table 77")
	run(t, "ip route add 10.6.0.0/16 dev lo table 78")
	run(t, "ip route add 10.7.0.0/16 dev lo tos 0x10")
	got, err := h.TableRoutes(map[int]bool{77: true})
	if err != nil || len(got) != 1 || got[0].Dst != netip.MustParsePrefix("10.5.0.0/16") || got[0].Table != 77 || got[0].Index != lo {
		t.Errorf("%+v, %v", got, err)
	}
	main, err := h.Routes()
	if err != nil || len(main) != 1 || main[0].TOS != 0x10 {
		t.Errorf("main table %+v, %v", main, err)
	}
}

func TestPolicies(t *testing.T) {
	inside(t)
	if got, err := Policies(); err != nil || len(got) != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	const tmpl = " tmpl src 10.0.0.1 dst 10.0.0.2 proto esp mode tunnel"
	for _, policy := range []string{
		"src 10.1.0.0/16 dst 192.0.2.0/24 dir out" + tmpl,
		"src 192.0.2.0/24 dst 10.1.0.0/16 dir fwd" + tmpl + " level use",
		"src 192.0.2.0/24 dst 10.1.0.0/16 dir in" + tmpl,
		"src 0.0.0.0/0 dst 198.51.100.1 dir out action block",
		"src 10.2.0.0/16 dst 10.3.0.0/16 dir out", // lets pass
		"src 10.2.0.0/16 dst 10.4.0.0/16 dir out if_id 7" + tmpl,
		"src fd00::/64 dst fd01::/64 dir out action block",
	} {
		run(t, "ip xfrm policy add "+policy)
	}
	p := netip.MustParsePrefix
	want := []Policy{
		{p("192.0.2.0/24"), p("10.1.0.0/16"), false, false},
		{p("10.1.0.0/16"), p("192.0.2.0/24"), true, true},
		{p("0.0.0.0/0"), p("198.51.100.1/32"), true, true},
	}
	got, err := Policies()
	slices.SortFunc(got, func(a, b Policy) int { return a.Dst.Addr().Compare(b.Dst.Addr()) })
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}

func TestDefaultPolicies(t *testing.T) {
	inside(t)
	everything := netip.MustParsePrefix("0.0.0.0/0")
	for _, step := range []struct {
		set  string
		want []Policy
	}{
		{"in block", nil},
		{"out block", []Policy{{everything, everything, true, true}}},
		{"fwd block", []Policy{{everything, everything, true, true}, {everything, everything, false, true}}},
		{"out accept", []Policy{{everything, everything, false, true}}},
		{"fwd accept", nil},
	} {
		run(t, "ip xfrm policy setdefault "+step.set)
		got, err := Policies()
		if !slices.Equal(step.want, got) || err != nil {
			t.Errorf("after %s: %+v, %v; want %+v", step.set, got, err, step.want)
		}
	}
}

// What changes is noticed, whatever it is.
func TestWatchNotices(t *testing.T) {
	for name, c := range map[string]struct {
		watch        func(context.Context, func()) error
		change, back string
	}{
		"rule":           {Watch, "ip rule add priority 100 lookup 77 fwmark 1", "ip rule del priority 100"},
		"sysctl":         {Watch, "sysctl net.ipv4.conf.lo.rp_filter=2", "sysctl net.ipv4.conf.lo.rp_filter=1"},
		"policy":         {WatchPolicies, "ip xfrm policy add src 10.1.0.0/16 dst 192.0.2.0/24 dir out action block", "ip xfrm policy flush"},
		"default policy": {WatchPolicies, "ip xfrm policy setdefault out block", "ip xfrm policy setdefault out accept"},
	} {
		t.Run(name, func(t *testing.T) {
			inside(t)
			ctx, cancel := context.WithTimeout(t.Context(), lab.Patience(5*time.Second))
			defer cancel()
			namespace := fmt.Sprintf("--net=/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
			done := make(chan struct{})
			go func() { // again and again: nobody knows when the watch has begun
				defer close(done)
				for ctx.Err() == nil {
					for _, command := range []string{c.change, c.back} {
						if err := exec.Command("nsenter", namespace, "sh", "-c", command).Run(); err != nil {
							t.Errorf("%s: %v", command, err)
						}
					}
				}
			}()
			noticed := false
			err := c.watch(ctx, func() { noticed = true; cancel() })
			<-done
			if !noticed || !errors.Is(err, context.Canceled) {
				t.Errorf("noticed %v, error %v", noticed, err)
			}
		})
	}
}
