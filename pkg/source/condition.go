package source

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Condition is a Node's condition NetworkUnavailable; zero when it has none.
type Condition struct {
	Status, Reason, Message string
	// Since is when the status became what it is.
	Since time.Time
}

// ConditionOf reads the condition from a Node.
func ConditionOf(n *corev1.Node) *Condition {
	i := slices.IndexFunc(n.Status.Conditions, unavailable)
	if i < 0 {
		return &Condition{}
	}
	c := n.Status.Conditions[i]
	return &Condition{Status: string(c.Status), Reason: c.Reason, Message: c.Message, Since: c.LastTransitionTime.Time}
}

func unavailable(c corev1.NodeCondition) bool { return c.Type == corev1.NodeNetworkUnavailable }

// observe passes on this node's condition, if the object is its Node.
func (s *store) observe(obj any) {
	if n, ok := obj.(*corev1.Node); ok && s.observed != nil && n.Name == s.self {
		s.observed(ConditionOf(n))
	}
}

// observeAbsence reports that this node has no Node, if that is its name.
func (s *store) observeAbsence(name string) {
	if s.observed != nil && name == s.self {
		s.observed(nil)
	}
}

// conditionsToKeep are those of a Node that observe reads.
func (s *store) conditionsToKeep(n *corev1.Node) []corev1.NodeCondition {
	if s.observed == nil || n.Name != s.self {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(n.Status.Conditions), func(c corev1.NodeCondition) bool { return !unavailable(c) })
}
