package agent

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// accepts counts the agent's accepts in the forward chain of an iptables.
func accepts(t *testing.T, program string) int {
	t.Helper()
	out, err := exec.Command(program, "-S", "FORWARD").CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	return strings.Count(string(out), netfilter.ForwardComment)
}

// Accepts stand while a policy drops and the agent may put them there; they come back at once, are said once, and go with the cleanup.
func TestForwardAccepts(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(program, func(t *testing.T) {
			l := testLoop(t)
			said := logged(l)
			ready(t, l)
			l.cfg.ForwardAccept = ForwardAcceptAuto
			expect := func(when string, want int, problems ...string) {
				t.Helper()
				l.inspect(t.Context())
				l.judge()
				if got := accepts(t, program); got != want {
					t.Errorf("%s: %d accepts, want %d", when, got, want)
				}
				l.expectNetworkProblems(t, when, problems...)
			}
			expect("policy accept", 0)
			run(t, program+" -P FORWARD DROP")
			expect("policy drop", 2)
			run(t, program+" -F FORWARD")
			expect("removed", 2)
			l.cfg.ForwardAccept = ForwardAcceptOff
			expect("off", 0, forwardDrop)
			l.cfg.ForwardAccept = ForwardAcceptAuto
			expect("auto", 2)
			if n := strings.Count(said.String(), "forward policy drops, packets of pods accepted"); n != 1 {
				t.Errorf("said %d times:\n%s", n, said)
			}
			if err := netfilter.RemoveForward(); err != nil || accepts(t, program) != 0 {
				t.Errorf("after removal %d accepts, error %v", accepts(t, program), err)
			}
		})
	}
}
