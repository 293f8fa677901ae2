/* Command lines, read by the table of commands. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tool.h"

int report_error(const args *a, int code, const char *format, ...) {
  va_list list;
  fprintf(stderr, "libdc %s: ", a->command->name);
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  return code;
}

static int option_index(const command *c, const char *name, size_t length) {
  for (int i = 0; i < MAX_OPTIONS && c->options[i].name != NULL; i++) {
    if (strlen(c->options[i].name) == length && strncmp(c->options[i].name, name, length) == 0) {
      return i;
    }
  }
  return -1;
}

static bool is_allowed(const char *values, const char *value) {
  size_t length = strlen(value);
  for (const char *at = values; at != NULL && *at != '\0';) {
    size_t bytes = strcspn(at, "|");
    if (bytes == length && strncmp(at, value, bytes) == 0) {
      return true;
    }
    at += bytes + (at[bytes] == '|' ? 1 : 0);
  }
  return values == NULL;
}

/* A whole number, as C writes it in decimal; false: it is none, or int64_t does not hold it. */
static bool read_number(const char *text, char **end, int64_t *number) {
  bool begins = (*text >= '0' && *text <= '9') || *text == '-'; /* strtoll would skip spaces and take a plus */
  errno = 0;
  *number = begins ? strtoll(text, end, 10) : 0;
  return begins && *end != text && errno == 0;
}

/* The option's numbers; how many there are, 0: the text has others than the option allows. */
static int read_numbers(const option *o, const char *text, int64_t *numbers) {
  for (int count = 0; count < o->numbers; text++) {
    char *end;
    if (!read_number(text, &end, &numbers[count]) || numbers[count] < o->minimum || numbers[count] > o->maximum) {
      return 0;
    }
    count++;
    if (*end == '\0') {
      return count;
    }
    if (*end != ',') {
      return 0;
    }
    text = end;
  }
  return 0;
}

static int check_value(const args *a, const option *o, const char *value) {
  int64_t numbers[MAX_NUMBERS];
  if (!is_allowed(o->values, value)) {
    return report_error(a, EXIT_USAGE, "%s = %s, must be %s", o->name, value, o->values);
  }
  if (o->numbers == 1 && read_numbers(o, value, numbers) == 0) {
    return report_error(a, EXIT_USAGE, "%s = %s, must be a number from %" PRId64 " to %" PRId64, o->name, value,
                        o->minimum, o->maximum);
  }
  if (o->numbers > 1 && read_numbers(o, value, numbers) == 0) {
    return report_error(a, EXIT_USAGE,
                        "%s = %s, must be 1 to %d numbers from %" PRId64 " to %" PRId64 " with commas between", o->name,
                        value, o->numbers, o->minimum, o->maximum);
  }
  return -1;
}

/* One option, "--name", "--name value" or "--name=value"; -1: go on. */
static int read_option(args *a, int argc, char **argv, int *at) {
  const command *c = a->command;
  const char *word = argv[*at];
  size_t length = strcspn(word, "=");
  if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
    print_help(c);
    return EXIT_OK;
  }
  int i = option_index(c, strcmp(word, "-o") == 0 ? "--output" : word, strcmp(word, "-o") == 0 ? 8 : length);
  if (i < 0) {
    return report_error(a, EXIT_USAGE, "%.*s is no option; libdc %s --help names them", (int)length, word, c->name);
  }
  const option *o = &c->options[i];
  if (o->argument == NULL) {
    if (word[length] == '=') {
      return report_error(a, EXIT_USAGE, "%s takes no value, but is given %s", o->name, word + length + 1);
    }
    a->value[i] = "";
    return -1;
  }
  if (word[length] == '=') {
    a->value[i] = word + length + 1;
  } else if (*at + 1 < argc) {
    a->value[i] = argv[++*at];
  } else {
    return report_error(a, EXIT_USAGE, "%s needs a value, %s", o->name, o->values != NULL ? o->values : o->argument);
  }
  return check_value(a, o, a->value[i]);
}

int read_args(const command *c, int argc, char **argv, args *a) {
  *a = (args){.command = c};
  for (int at = 0; at < argc; at++) {
    if (argv[at][0] == '-' && argv[at][1] != '\0') {
      int code = read_option(a, argc, argv, &at);
      if (code >= 0) {
        return code;
      }
    } else if (c->operand == NULL) {
      return report_error(a, EXIT_USAGE, "%s is one argument too many; it takes options only", argv[at]);
    } else if (a->operand != NULL) {
      return report_error(a, EXIT_USAGE, "%s is one argument too many after %s = %s", argv[at], c->operand, a->operand);
    } else {
      a->operand = argv[at];
    }
  }
  if (c->operand != NULL && a->operand == NULL && !c->operand_optional) {
    return report_error(a, EXIT_USAGE, "%s is missing%s%s; libdc %s --help tells more", c->operand,
                        c->operand_values != NULL ? ", must be " : "",
                        c->operand_values != NULL ? c->operand_values : "", c->name);
  }
  if (a->operand != NULL && !is_allowed(c->operand_values, a->operand)) {
    return report_error(a, EXIT_USAGE, "%s = %s, must be %s", c->operand, a->operand, c->operand_values);
  }
  return -1;
}

const char *value_of(const args *a, const char *name) {
  int i = option_index(a->command, name, strlen(name));
  return i < 0 ? NULL : a->value[i];
}

bool has_option(const args *a, const char *name) {
  return value_of(a, name) != NULL;
}

int64_t number_of(const args *a, const char *name, int64_t fallback) {
  const int i = option_index(a->command, name, strlen(name));
  int64_t number = fallback;
  if (a->value[i] != NULL) {
    (void)read_numbers(&a->command->options[i], a->value[i], &number); /* read_args() has found it right */
  }
  return number;
}

int numbers_of(const args *a, const char *name, const char *text, int64_t *numbers) {
  const int i = option_index(a->command, name, strlen(name));
  return read_numbers(&a->command->options[i], a->value[i] != NULL ? a->value[i] : text, numbers);
}
