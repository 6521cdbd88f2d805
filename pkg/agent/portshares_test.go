package agent

import (
	"net"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// The host keeps the larger of half its ephemeral ports and 8 192, whatever is asked for.
func TestPortShares(t *testing.T) {
	t.Parallel()
	var every ports
	every.add(1, 65535)
	for name, tt := range map[string]struct {
		asked, ephemeral portRange
		others, used     ports
		want             string
		problems         string
	}{
		"a default node":            {asked: portRange{49152, 65535}, ephemeral: portRange{32768, 60999}, want: "49152-65535"},
		"outside the ephemeral":     {asked: portRange{1025, 32767}, ephemeral: portRange{32768, 60999}, want: "1025-32767"},
		"the ephemeral of IANA":     {asked: portRange{49152, 65535}, ephemeral: portRange{49152, 65535}, want: "58368-65535", problems: "snat_ports 49152-65535"},
		"a wide range":              {asked: portRange{32768, 65535}, ephemeral: portRange{32768, 60999}, want: "48649-65535", problems: "snat_ports 32768-65535"},
		"the same from below":       {asked: portRange{10000, 60999}, ephemeral: portRange{32768, 60999}, want: "10000-45118", problems: "snat_ports 10000-60999"},
		"nearly all are ephemeral":  {asked: portRange{49152, 65535}, ephemeral: portRange{1024, 65535}, want: "49152-65535"},
		"all are the host's":        {asked: portRange{49152, 65535}, ephemeral: portRange{50000, 58191}, want: "58192-65535", problems: "snat_ports 49152-65535"},
		"nothing is left":           {asked: portRange{52000, 53000}, ephemeral: portRange{50000, 58191}, want: "1-0", problems: "snat_ports 52000-53000"},
		"one can be spared":         {asked: portRange{52000, 53000}, ephemeral: portRange{50000, 58193}, want: "53000-53000", problems: "snat_ports 52000-53000"},
		"others' reservations":      {asked: portRange{49152, 65535}, ephemeral: portRange{32768, 60999}, others: between(32768, 42767), want: "57399-65535", problems: "snat_ports 49152-65535"},
		"others have reserved ours": {asked: portRange{49152, 65535}, ephemeral: portRange{32768, 60999}, others: between(49152, 65535), want: "49152-65535"},
		"others have reserved all":  {asked: portRange{49152, 65535}, ephemeral: portRange{50000, 60000}, others: between(49152, 65535), want: "49152-65535", problems: "ephemeral_ports "},
		"few ephemeral ones":        {asked: portRange{49152, 65535}, ephemeral: portRange{40000, 40999}, want: "49152-65535", problems: "ephemeral_ports "},
		"some host ports": {
			asked: portRange{49152, 65535}, ephemeral: portRange{49152, 65535}, used: between(50000, 50999, 80, 30000), want: "58368-65535", problems: "snat_ports 49152-65535",
		},
		"too many host ports": {
			asked: portRange{49152, 65535}, ephemeral: portRange{49152, 65535}, used: between(50000, 51999), want: "58368-65535", problems: "snat_ports 49152-65535, unreserved_ports ",
		},
		"any number of host ports": {asked: portRange{49152, 65535}, ephemeral: portRange{32768, 60999}, used: every, want: "49152-65535", problems: "unreserved_ports "},
	} {
		s := shareSnat(tt.asked, tt.ephemeral, tt.others)
		s.add(tt.used)
		var problems []string
		for _, p := range s.problems() {
			problems = append(problems, p.Subject())
			if p.Remedy == "" || strings.Contains(p.Text+p.Remedy, "%!") {
				t.Errorf("%s: %+v", name, p)
			}
		}
		if got := strings.Join(problems, ", "); s.snat.String() != tt.want || got != tt.problems {
			t.Errorf("%s: masquerades to %s, problems %q; want %s, %q", name, s.snat, got, tt.want, tt.problems)
		}
		own, size := tt.ephemeral.ports().without(s.ours), tt.ephemeral.size()
		if least := min(s.free.count(), max(size/2, 8192)); own.count() < least {
			t.Errorf("%s: %d of %d ephemeral ports are left to the host, want %d", name, own.count(), size, least)
		}
		if left := tt.used.without(s.ours); left.count() != s.unreserved || left.without(tt.ephemeral.ports()) != (ports{}) {
			t.Errorf("%s: %d ports in use are not reserved, %d are said not to be: %s", name, left.count(), s.unreserved, left)
		}
	}
}

func TestPortRange(t *testing.T) {
	t.Parallel()
	if r, err := parsePortRange("32768\t60999"); r != (portRange{32768, 60999}) || err != nil || r.size() != 28232 {
		t.Errorf("%s, error %v", r, err)
	}
	for _, bad := range []string{"", "1", "x y", "1 70000"} {
		if r, err := parsePortRange(bad); err == nil {
			t.Errorf("%q is %s", bad, r)
		}
	}
	if noPorts.size() != 0 || noPorts.ports() != (ports{}) {
		t.Errorf("%s are %d ports", noPorts, noPorts.size())
	}
}

// bindAny has the kernel choose a port for sockets of both families.
func bindAny(t *testing.T) {
	t.Helper()
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		tcp, err := net.Listen("tcp", at)
		if err != nil {
			t.Errorf("a port of any number: %v", err)
			continue
		}
		tcp.Close()
		udp, err := net.ListenPacket("udp", at)
		if err != nil {
			t.Errorf("a port of any number: %v", err)
			continue
		}
		udp.Close()
	}
}

// The node's own sockets get ports whatever the range of ephemeral ones is when the agent starts, or becomes later; the programs
// follow.
func TestEphemeralPortsAreLeft(t *testing.T) {
	l := testLoop(t)
	log := logged(l)
	sysctl := device.Sysctl{}
	become := func(ephemeral string) {
		t.Helper()
		if _, err := sysctl.Set(ephemeralPorts, ephemeral); err != nil {
			t.Fatal(err)
		}
	}
	become("50000 60000") // what testLoop masquerades to
	shares, err := l.sysctls.portShares()
	if err != nil || shares.snat != (portRange{58419, 60000}) {
		t.Errorf("the first programs would masquerade to %s, error %v", shares.snat, err)
	}
	l.mode.beginWith(shares.snat)
	ready(t, l)
	if l.follow(t, l.complaints.now()) {
		t.Error("the programs are replaced at once")
	}
	for _, tt := range []struct{ ephemeral, snat, problem string }{
		{"50000 60000", "58419-60000", snatPortsReduced},
		{"32768 60999", "50000-60000", ""},
		{"49152 65535", "52833-60000", snatPortsReduced},
		{"52000 60191", "50000-51999", snatPortsReduced},
		{"1024 65535", "50000-60000", ""},
	} {
		before := l.mode.snat
		become(tt.ephemeral)
		l.inspect(t.Context())
		l.judge()
		if got := l.follow(t, l.complaints.now()); got != (before.String() != tt.snat) {
			t.Errorf("%s: programs replaced: %v", tt.ephemeral, got)
		}
		if l.mode.snat.String() != tt.snat {
			t.Errorf("%s: the programs masquerade to %s, want %s", tt.ephemeral, l.mode.snat, tt.snat)
		}
		if got, err := sysctl.Get(reservedPorts); got != tt.snat || err != nil {
			t.Errorf("%s: %s are reserved, error %v, want %s", tt.ephemeral, got, err, tt.snat)
		}
		bindAny(t)
		l.expectNetworkProblems(t, tt.ephemeral, strings.Fields(tt.problem)...)
	}
	if !strings.Contains(log.String(), `"network problem" reason=snat_ports`) || !strings.Contains(log.String(), `"other ports to masquerade to" ports=52833-60000`) {
		t.Errorf("logged:\n%s", log)
	}
	if degraded := l.complaints.degraded(); len(degraded) > 0 {
		t.Errorf("degraded by %v", degraded)
	}
}
