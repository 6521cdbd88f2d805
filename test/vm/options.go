package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// packages are those whose tests ask the kernel for something: rings 2 to 4.
var packages = []string{
	"./maps/counters", "./maps/raw", "./maps/typed", "./pkg/attach", "./pkg/bpffs", "./pkg/device", "./pkg/observe", "./cmd/ebpfctl",
	"./pkg/datapath", "./test/lab", "./test/e2e", "./cni",
	// Last: its tests age flows by minutes, and no flow can be older than the machine.
	"./test/prog",
}

// verifierDir has the test that writes the bounds of the verifier's work.
const verifierDir = "pkg/datapath"

// counts makes long computations short: the emulated processors are some twenty times slower than the host's.
var counts = map[string][]string{
	"test/prog": {"-packets=5000", "-rounds=500"},
	"test/e2e":  {"-payload=500007", "-attach=newest", "-pace=40ms", "-kills=2"},
}

// selected are the tests that run where a package's all would take too long, unless -run says otherwise. What is left out
// repeats with other timing, asks nothing of the kernel that these do not, or is asked of the programs alone by test/prog.
var selected = map[string]string{
	"pkg/datapath": "^(TestVerifier|TestStackLeft.*|TestProbe.*|TestLoadOnAFreshNode|TestUpgradeReplacesEveryAttachment|" +
		"TestLoadChangesHowProgramsAreAttached|TestGrownLayoutKeepsEveryEntry|TestSweepEndsWhatIsIdle|" +
		"TestRemoveLeavesNothingOfOurs|TestUplinksComeAndGo|TestLoadWithFewRights)$",
	"cni": "^(TestAddMakesAPodAndDelUnmakesIt|TestHostReachesThePod|TestOrderOfAdd|TestClsact|TestKilledAddLeavesNothing|" +
		"TestKilledDelIsFinishedByTheNext|TestGC|TestReboot|TestInTheHandsOfLibcni|TestInTheHandsOfCnitool)$",
	"test/e2e": "^(TestEverybodyReachesEverybody|TestPayloadsSurviveOffloads|TestWorldOpensFlowsToPods|" +
		"TestGatewayIsAnswered|TestSmallerMTUOutside|TestClosedPortsRefuse|TestPodsOfANodeThatDoesNotAnswer|" +
		"TestSameSourcePortToTheSameServer|TestEveryPortInUse|TestHostSocketKeepsItsPort|" +
		"TestWorldOpensTheTupleThatIsMasqueraded|TestNewOwnerOfAnAddressInheritsNothing|TestFullTableSparesTheEstablished|" +
		"TestForeignPrograms.*|TestEachProgramRemovedAlone|TestPodsTalkThroughIPsec|" +
		"TestOffload.*|TestTunnelBetweenPods|" +
		"TestLifeKilledAgentLosesNoPacket|TestLifeStoppedAgentTouchesNothing|" +
		"TestCleanupLeavesTheNodeAsItWas)$",
}

// testOptions are what go test would take.
type testOptions struct {
	verbose bool
	run     string
	rest    []string // for the binaries, as given
	seconds int
	update  bool
}

// parseTestFlags reads go test's own flags, with one or two dashes, and leaves the others to the binaries.
func parseTestFlags(flags []string) (testOptions, error) {
	var o testOptions
	for i := 0; i < len(flags); i++ {
		flag := "-" + strings.TrimLeft(flags[i], "-")
		name, value, has := strings.Cut(flag, "=")
		if !strings.HasPrefix(flags[i], "-") {
			return o, fmt.Errorf("TESTFLAGS: %q is no flag", flags[i])
		}
		takesValue := slices.Contains([]string{"-run", "-skip", "-count", "-timeout"}, name)
		if takesValue && !has {
			if i++; i == len(flags) {
				return o, fmt.Errorf("TESTFLAGS: %s needs a value", name)
			}
			value = flags[i]
		}
		switch {
		case name == "-v":
			o.verbose = value != "false"
		case name == "-run":
			o.run = value
		case takesValue, name == "-short", name == "-failfast":
			return o, fmt.Errorf("TESTFLAGS: %s is not for test-kernels; -run and -v are, and the packages' own flags", name)
		default:
			o.rest = append(o.rest, flags[i])
		}
	}
	return o, nil
}

// pattern is what -run chooses in a package.
func (o testOptions) pattern(dir string) string { return cmp.Or(o.run, selected[dir]) }

// list is the pattern of the tests on the first level that run.
func (o testOptions) list(dir string) string {
	first, _, _ := strings.Cut(o.pattern(dir), "/")
	if first == "" {
		return "."
	}
	return first
}

// args is the command line of one package's binary.
func (o testOptions) args(dir string) []string {
	args := []string{"-test.v", "-test.count=1", fmt.Sprintf("-test.timeout=%ds", max(1, o.seconds-10))}
	if pattern := o.pattern(dir); pattern != "" {
		args = append(args, "-test.run="+pattern)
	}
	return append(append(args, counts[dir]...), o.rest...)
}

// whole says whether all tests run that do by default, so that a skip that is expected must be there.
func (o testOptions) whole() bool { return o.run == "" }
