package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What people's tools print of the path, run in a pod.

// tracers are the tools that print a path's hops.
var tracers = []struct {
	name string
	args func(to netip.AddrPort) []string
}{
	{"traceroute", func(netip.AddrPort) []string { return nil }},
	{"traceroute -I", func(netip.AddrPort) []string { return []string{"-I"} }},
	{"traceroute -T", func(to netip.AddrPort) []string { return []string{"-T", "-p", strconv.Itoa(int(to.Port()))} }},
}

// answerEveryProbe has every host say that a probe has ended there as often as it is asked, where the kernel would after six only once a second.
func answerEveryProbe(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, ns := range l.Namespaces() {
		for _, family := range l.Options.Families {
			if err := ns.WriteSysctl([wire.Families]string{"net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"}[family], "0"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// traced is what the tools are to find.
type traced struct {
	hops     []netip.Addr // the last is whom they look for
	mtu      int
	narrowed netip.Addr // who says that the MTU is less than the pod's; invalid if nobody does
}

// assertTraced wants the tools to print a path's hops and its MTU.
func assertTraced(t *testing.T, pod *lab.Pod, to netip.AddrPort, want traced) {
	t.Helper()
	var hops, complaints []string
	for i, hop := range want.hops {
		hops = append(hops, fmt.Sprintf("%d %s", i+1, hop))
	}
	if want.narrowed.IsValid() {
		complaints = append(complaints, fmt.Sprintf("%s %d", want.narrowed, want.mtu))
	}
	for _, tool := range tracers {
		out := run(t, pod.Namespace, "traceroute", append(tool.args(to), "-n", "-q", "1", "-N", "1", "-w", "2", to.Addr().String())...)
		if got := found(out, `(?m)^ *(\d+)  (\S+)  [\d.]+ ms`); !slices.Equal(got, hops) {
			t.Errorf("%s: the hops %q, want %q:\n%s", tool.name, got, hops, out)
		}
	}
	out := run(t, pod.Namespace, "tracepath", "-n", to.Addr().String())
	for _, c := range []struct {
		what, pattern string
		want          []string
	}{
		{"the hops", `(?m)^ *(\d+):  (\S+) +[\d.]+ms *(?:reached)?$`, hops},
		{"who has a smaller MTU", `:  (\S+) +[\d.]+ms pmtu (\d+)`, complaints},
		{"MTU, hops, hops back", `Resume: pmtu (\d+) hops (\d+) back (\d+)`, []string{fmt.Sprintf("%d %d %[2]d", want.mtu, len(hops))}},
	} {
		if got := slices.Compact(found(out, c.pattern)); !slices.Equal(got, c.want) {
			t.Errorf("tracepath: %s: %q, want %q:\n%s", c.what, got, c.want, out)
		}
	}
}

// found are the groups of each match, with a space between.
func found(text, pattern string) (all []string) {
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		line := match[1]
		for _, group := range match[2:] {
			line += " " + group
		}
		all = append(all, line)
	}
	return all
}

// run runs a program in a namespace, and returns what it has printed.
func run(t *testing.T, ns *lab.Namespace, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out []byte
	err := ns.Do(func() (err error) {
		out, err = exec.CommandContext(ctx, program, args...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Errorf("%s %q in %s: %v", program, args, ns.Netns(), err)
	}
	return string(out)
}
