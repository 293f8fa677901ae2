/* Whether one of our prototypes fits that of NVIDIA's header: types agree if they are passed in the same way, as
 * pointers, integers and enumerations of the same size are. */
#ifndef TESTS_SAME_TYPE_H
#define TESTS_SAME_TYPE_H

#include <type_traits>

template <typename T>
constexpr int kind() {
  return std::is_pointer<T>::value ? 1 : std::is_enum<T>::value || std::is_integral<T>::value ? 2 : 3;
}

template <typename A, typename B>
constexpr bool alike() {
  return sizeof(A) == sizeof(B) && kind<A>() == kind<B>() && kind<A>() != 3;
}

template <typename F, typename G>
struct same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct same<R (*)(A...), S (*)(B...)>
    : std::integral_constant<bool, sizeof...(A) == sizeof...(B) && alike<R, S>() && (alike<A, B>() && ...)> {};

/* A missing argument, or one of another kind, is noticed. */
static_assert(!same<int (*)(int), int (*)(int *)>::value, "");

#define NUMBER(ours, theirs) static_assert((int)(ours) == (int)(theirs), #ours " differs from NVIDIA's header")

#endif
