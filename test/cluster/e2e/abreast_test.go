package e2e

import (
	"os"
	"testing"
)

type test struct {
	name string
	run  func(*testing.T)
}

// onShared are tests on the cluster of all that wait for most of their time. By their file's name they come first: later tests have to
// stand what these do to the cluster.
var onShared = []test{
	{"APIServerAway", testAPIServerAway},
	{"NodeComesAndGoes", testNodeComesAndGoes},
	{"UpgradeFromThePreviousCommit", testUpgradeFromThePreviousCommit},
	{"BadUpdates", testBadUpdates},
	{"CrowdRolledOver", testCrowdRolledOver}, // Kubernetes takes half a minute to find what was killed
}

// onOwn are tests with clusters of their own. They run one after the other beside the shared ones: more than five kubelets at once
// need more than the 128 inotify instances that the kernel gives one user.
var onOwn = []test{
	{"MoveFromFlannel", testMoveFromFlannel},
	{"InstallAsOnK3s", testInstallAsOnK3s},
	{"ServicesWithoutKubeProxy", testServicesWithoutKubeProxy},
	{"UpAndDown", testUpAndDown},
}

// long are the tests with clusters of their own that only the long form runs. MoveFromFlannel also reboots a node and routes directly.
var long = []test{{"BecomesDual", testBecomesDual}, {"MoveFromFlannelHostGW", testMoveFromFlannelHostGW}}

func TestAbreast(t *testing.T) {
	bare(t)
	// How nodes get ready is watched meanwhile, with nothing else going on.
	if _, err := makeStanding(); err != nil {
		t.Fatal(err)
	}
	t.Run("Beside", func(t *testing.T) {
		inTurn(t, "Own", onOwn)
		inTurn(t, "Shared", onShared)
	})
	if isLong() {
		for _, one := range long {
			t.Run(one.name, one.run)
		}
	}
}

func isLong() bool { return os.Getenv("TEST_LONG") == "1" }

// inTurn runs tests one after the other, beside those of other names.
func inTurn(t *testing.T, name string, tests []test) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		for _, one := range tests {
			t.Run(one.name, one.run)
		}
	})
}
