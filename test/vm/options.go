package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
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

// counts makes long computations short: the emulated processors are some twenty times slower than the host's, and have nothing to
// spare for a second test.
var counts = map[string][]string{
	"test/prog": {"-packets=2000", "-rounds=500"},
	"test/e2e":  {"-payload=500007", "-attach=newest", "-pace=40ms", "-kills=2", "-each-offload=false", "-few-clusters", "-test.parallel=1"},
}

// selected are the tests that run where a package's all would take too long, unless -run says otherwise: on the oldest supported
// kernel, and on any of which nothing else is said, all that depends on a kernel. What is left out repeats with other timing, asks
// nothing of the kernel that these do not, or is asked of the programs alone by test/prog.
var selected = selection{
	"pkg/datapath": tests("TestVerifier", "TestStackLeft", "TestProbe.*", "TestLoadOnAFreshNode", "TestUpgradeReplacesEveryAttachment",
		"TestLoadChangesHowProgramsAreAttached", "TestRemoveLeavesNothingOfOurs", "TestLoadWithFewRights"),
	"pkg/observe": tests("TestReadJSON", "TestReadOfChangingHash", "TestSurveyFinds.*", "TestSurveyOfHealthyNode", "TestSurveyOfProgramsToPods"),
	"cni":         tests("TestAddMakesAPodAndDelUnmakesIt", "TestHostReachesThePod", "TestOrderOfAdd", "TestClsact", "TestReboot", "TestInTheHandsOfLibcni"),
	"test/e2e": tests("TestEverybodyReachesEverybody", "TestPayloadsSurviveOffloads", "TestWorldOpensFlowsToPods", "TestSmallerMTUOutside", "TestForeignPrograms.*",
		"TestOffloadForgesNothing", "TestOffloadsOfPodsAreCarriedOut", "TestSumsFollowWhatChanges", "TestTunnelBetweenPods",
		"TestGREAndSCTPBetweenPods", "TestCleanupLeavesTheNodeAsItWas", "TestProcessesReachServices", "TestWireGuardUplink", "TestIPIPUplink"),
	"test/prog": tests(slices.Concat(mainPaths, helpersOfTheKernel)...),
}

// mainPaths are the tests of test/prog that walk each program's main path.
var mainPaths = []string{
	"TestFromPodVerdicts", "TestFromUplinkVerdicts", "TestToUplinkVerdicts", "TestWorldByRoute", "TestWorldOpensFlow",
	"TestMasqueradedFlow", "TestSamePortOfTwoPods", "TestHostSocketsAvoided", "TestFlowViaStack", "TestNodeFlowGivesWay",
	"TestFragmentedBothWays", "TestICMPErrorFromWorld", "TestICMPErrorFromPod", "TestResetOfUnknownConnection", "TestBesideNetfilter",
	"TestPortsOfNetfilterAreAvoided", "TestStackDecidesOnADestination", "TestCollectDeletedPods", "TestSweepInSlices", "TestVLAN.*",
	"TestRandomPackets", "TestFromPodThroughTheTunnel", "TestFromTunnelVerdicts", "TestTunnelOnTheWire", "TestNodePort",
	"TestPodThroughTheTunnelOnTheWire", "TestGatewaySolicited", "TestExtensionHeaders", "TestFromTunnelOverEitherFamily",
	"TestBridgeVerdicts", "TestBridgeFlows",
}

// helpersOfTheKernel are those that ask more of the kernel than tables: its checksums and segments, changes of a packet's size,
// its sockets and neighbours, netfilter's table, long searches, and tables that are full. Of Services and of what comes from
// outside, one asks for each of these; the others ask our own tables.
var helpersOfTheKernel = []string{
	"Test.*OnTheWire", "Test.*Checksums?", "TestMasqueradedWithPendingChecksumInside", "TestSegmentsFit.*", "TestTooBig", "TestResetOfOddSegments", "TestTooBig.*Segments",
	"TestFragmentsOfIPv6", "TestFlowLabelKept", "TestHostSockets.*", "TestServiceBesideSockets", "TestSilentNeighbours", "TestManyFlows", "TestSnatFull",
	"TestSearchOfFullRange", "TestServiceFlow", "TestServiceFragments", "TestServiceOfTheHost", "TestEcho", "TestRefused", "TestTakenOver", "TestToPodErrors",
	"TestThroughTheTunnelBesideNetfilter", "TestTwoProgramsBehindEachOther", "TestNodePortBesideSockets", "TestOutsideFragments.*", "TestOutsideBesideNetfilter",
}

// narrowed are what runs instead on a kernel that lies between two others on which more is proven, by its series.
//
// 6.12 lies between 6.1 and the kernels of today, on which make test runs everything: what works the same way before and after it
// is not asked once more, unless its package is named. Its own are its verifier and compiler, and its tcx, which 6.1 does not have: every configuration loads,
// attachments come, are replaced and go, and each program's main path is walked by packets that are compared, then by traffic.
var narrowed = map[string]selection{"6.12": {
	"pkg/bpffs": nothing, "cmd/ebpfctl": nothing, "test/lab": nothing,
	"pkg/datapath": tests("TestVerifier", "TestProbe.*", "TestUpgradeReplacesEveryAttachment", "TestLoadChangesHowProgramsAreAttached",
		"TestRemoveLeavesNothingOfOurs"),
	"cni":      tests("TestOrderOfAdd", "TestInTheHandsOfLibcni"),
	"test/e2e": tests("TestEverybodyReachesEverybody", "TestForeignProgramsBesideOurs", "TestWireGuardUplink", "TestIPIPUplink"),
	"test/prog": tests("Test.*Verdicts", "Test.*OnTheWire", "TestWorldOpensFlow", "TestMasqueradedFlow", "TestNodePort", "TestFragmentedBothWays",
		"TestICMPErrorFromWorld", "TestHostSocketsAvoided", "TestBesideNetfilter", "TestSweepInSlices", "TestRandomPackets"),
}}

// selection says by directory which of a package's tests run, as -run does; a package that is not named runs all of its own.
type selection map[string]string

// nothing is matched by no test.
const nothing = "^$"

// tests is the pattern of tests by their names, which may be patterns themselves.
func tests(names ...string) string { return "^(" + strings.Join(names, "|") + ")$" }

// testOptions are what go test would take.
type testOptions struct {
	verbose bool
	run     string
	named   bool     // the packages are, so that every kernel runs all that one does of which nothing is said
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

// pattern is what runs of a package on a kernel: what -run says, or else what is chosen here.
func (o testOptions) pattern(dir, series string) string {
	narrow := narrowed[series]
	if o.named {
		narrow = nil
	}
	return cmp.Or(o.run, narrow[dir], selected[dir], ".")
}

// suites are the packages with their tests that run on a kernel, and how.
func (o testOptions) suites(all []suite, series string) ([]suite, error) {
	var out []suite
	for _, s := range all {
		pattern := o.pattern(s.Dir, series)
		first, _, _ := strings.Cut(pattern, "/")
		chosen, err := regexp.Compile(first)
		if err != nil {
			return nil, fmt.Errorf("TESTFLAGS: -run %s: %w", pattern, err)
		}
		s.tests = slices.DeleteFunc(slices.Clone(s.tests), func(name string) bool { return !chosen.MatchString(name) })
		if len(s.tests) == 0 {
			continue
		}
		s.Args = o.args(s.Dir, pattern)
		out = append(out, s)
	}
	if len(out) == 0 {
		return nil, errors.New("no test to run")
	}
	return out, nil
}

// machines are the suites by the machine that runs them: the lab's take as long as all others.
func machines(all []suite) (parts [][]suite) {
	var lab, others []suite
	for _, s := range all {
		if s.Dir == "test/e2e" {
			lab = append(lab, s)
		} else {
			others = append(others, s)
		}
	}
	return slices.DeleteFunc([][]suite{others, lab}, func(part []suite) bool { return len(part) == 0 })
}

// args is the command line of one package's binary.
func (o testOptions) args(dir, pattern string) []string {
	args := []string{"-test.v", "-test.count=1", fmt.Sprintf("-test.timeout=%ds", max(1, o.seconds-10)), "-test.run=" + pattern}
	args = append(args, counts[dir]...)
	if o.update && dir == verifierDir {
		args = append(args, "-update")
	}
	return append(args, o.rest...)
}

// whole says whether all tests run that do by default, so that a skip that is expected must be there.
func (o testOptions) whole() bool { return o.run == "" }
